//! Which data a volume has: volumes may share files, devices and parts of both.

pub(crate) mod claim;
pub(crate) mod key;
pub(crate) mod layers;
pub(crate) mod part;
