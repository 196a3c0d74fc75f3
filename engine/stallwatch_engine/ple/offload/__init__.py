"""The PLE tables in a process of their own: requests and rows pass through shared memory.

The process is spawned, never forked after torch. Each rank has a socket (SOCK_SEQPACKET: messages keep
their borders) and a block of shared memory that it allocated and sealed. Nothing is pickled.
"""
