"""What ran: a trace, read and compared with what its program was predicted to do."""
