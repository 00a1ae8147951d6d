"""Speed, memory use, and how much a memory can withstand: measurements that depend on the machine."""
