"""The metadata layer (sequence, block_manager, scheduler), and what runs its decisions on a device."""
