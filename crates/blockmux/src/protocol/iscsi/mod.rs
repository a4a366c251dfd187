//! iSCSI, as the commands know it.

mod remote;
mod secret;

pub(crate) use remote::of_url;
