"""The runtime of the Acme accelerator; a program that imports it runs its models there."""
