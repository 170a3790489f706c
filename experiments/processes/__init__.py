"""Several processes that run one command: how they find, agree with and lose each other."""
