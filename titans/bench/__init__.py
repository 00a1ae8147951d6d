"""Speed, memory in use, and what a memory bears: measurements that depend on the machine."""
