//! Names: the URL of a volume ([`uri`]), the identity of its data ([`volume_uuid`]), and the
//! networks whose clients may use it ([`networks`]).

pub mod networks;
pub mod uri;
pub mod volume_uuid;
