//! What authenticates and admits clients: secrets, certificates, networks.

pub(crate) mod certificates;
pub(crate) mod networks;
pub(crate) mod secret;
