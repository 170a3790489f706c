"""The configuration of an experiment: its types, how it is composed, and what is wrong with one."""
