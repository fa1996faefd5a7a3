"""Scripts for those who change the library."""
