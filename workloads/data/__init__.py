"""What programs read and make: generators and formats."""
