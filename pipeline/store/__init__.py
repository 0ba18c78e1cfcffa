"""Store artifacts by content: a local folder, and behind it a shared one."""
