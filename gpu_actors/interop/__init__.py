"""Arrays of other libraries, taken in and given back."""
