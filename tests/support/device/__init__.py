"""A device that is simulated on the CPU, which detects missing synchronization and delays copies as long as possible.

FSDP2 uses the streams of `torch.cpu`, which do nothing, and `infinity.memory.device` uses the same API. `simulation`
gives these streams the semantics of an accelerator: operations are ordered only by streams and events. Tensors and
kernels are real, so that results can be compared bitwise with training in memory. The simulation does not cover driver
limits, block sizes of the caching allocator, NCCL, hooks on autograd threads, and execution times.

    clocks       vector clocks, accesses and races
    streams      streams and events, and delayed copies
    memory       ownership of memory: stream, host or pinned
    simulation   dispatch mode, and replacements for functions of `torch.cpu` and of the package
    threads      synchronization between threads of the package, and NVMe transfers to cache slots
    defects      defects that the simulation must detect
    cases        training runs on the simulated device, on every rank
    tables       parameters of tests on simulated and real devices
"""
