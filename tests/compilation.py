"""How XLA compiles the programs of the tests, and how those of users."""

from importlib.metadata import version

# Programs of tests run once or twice, for less time than they take to compile, which is a fifth
# without LLVM's optimization, with XLA's plain emitters of loops and in one piece. Flags of the
# environment come later and win, so that all can be tested as users compile it, in twice the time
# or more: XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true" make
# test
FAST = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# What XLA does unless it is told otherwise.
OPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
# JAX 0.12 has no plain emitters any more, and stops at a flag that it does not know.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):
    FAST.append("--xla_cpu_use_fusion_emitters=false")
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
