//! NBD, target and initiator.
