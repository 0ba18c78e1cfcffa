"""Execute steps: in processes of this machine, or on nodes of a Ray cluster; nobody else knows which."""
