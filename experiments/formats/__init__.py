"""Files of unknown origin in other programs' formats, read without running what they hold."""
