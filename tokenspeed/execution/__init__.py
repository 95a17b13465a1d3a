"""Running a plan on a device."""
