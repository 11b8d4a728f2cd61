"""What people see: streams, live lines, answers as they grow, progress, the keyboard."""
