"""The library that Aerie's command lines are thin over; one module, one idea."""
