"""A device that is simulated on the CPU: it finds what is not ordered, and copies as late as it may.

FSDP2 takes the streams of a CPU from `torch.cpu`, where they do nothing, and `infinity.memory.device` is written with
the same names. `simulation` gives them the meaning that they have on an accelerator: what is launched is ordered by
streams, events and nothing else. Tensors and kernels are the real ones, so bits can be compared with training in
memory. What it does not show: limits of drivers, sizes in pools of an allocator, NCCL, hooks on threads of autograd,
and how long anything takes.

    clocks       who is ordered behind whom: vector clocks, accesses, races
    streams      streams and events, and copies that wait in them
    memory       which memory is of a stream, of the host, or pinned
    simulation   puts it together: a dispatch mode, and what `torch.cpu` and the package are given meanwhile
    threads      what orders threads of the package, and what reaches its cache slots without torch
    defects      changes to the package that the simulation has to find
    cases        trainings on it, on every rank
    tables       what it is tried with, and real devices
"""
