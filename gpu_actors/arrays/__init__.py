"""Arrays of any library, taken in and given back."""
