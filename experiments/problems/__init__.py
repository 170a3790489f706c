"""Problems that data are made or published for: samples, solvers and what is kept of them."""
