"""C++ that runs on a CPU (kernels/), built by the machine's own compiler: the build, and attention of training."""
