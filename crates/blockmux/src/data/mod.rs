//! Which data a volume has: volumes may share files, devices and parts of both. Also what its
//! clients recognize it by.

pub(crate) mod claim;
pub(crate) mod key;
pub(crate) mod layers;
pub(crate) mod part;
pub(crate) mod unit_identity;
