//! Names: the URL of a volume ([`uri`]), the identity of its data ([`volume_uuid`]), the
//! networks whose clients may use it ([`networks`]), and where they find it (`portal`).

pub mod networks;
pub(crate) mod portal;
pub mod uri;
pub mod volume_uuid;
