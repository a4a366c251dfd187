//! Names: the URL of a volume ([`uri`]) and its RDMA fabric ([`rdma`]), the identity of its data
//! ([`volume_uuid`]) and the configured one of its logical unit ([`unit_identity`]), the networks
//! whose clients may use it ([`networks`]), where they find it (`portal`), and lists by name
//! ([`named_list`]).

pub mod named_list;
pub mod networks;
pub(crate) mod portal;
pub mod rdma;
pub mod unit_identity;
pub mod uri;
pub mod volume_uuid;
