"""What a trained model comes to: predictions of whole clouds, errors, tables and reports."""
