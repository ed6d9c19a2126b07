"""`make conformance`: both RNICs of this package, as target and as initiator, and the suite of `kbtp.conformance`."""
