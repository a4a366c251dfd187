//! A change of one object of the config, as the API and `ctl` request it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;
use utoipa::ToSchema;

/// A change of one object of a daemon's config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConfigEdit {
    pub(crate) path: ObjectPath,
    pub(crate) operation: EditOperation,
    pub(crate) options: EditOptions,
}

/// How an edit is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EditOptions {
    /// Also if sessions use what is removed.
    pub(crate) force: bool,
    /// Only compute what would change.
    pub(crate) dry_run: bool,
    /// The tag that the object must have, so that the edit overwrites no change that its author has
    /// not seen.
    pub(crate) if_match: Option<String>,
    /// The tags that the object must not have; `*`: it must not exist.
    pub(crate) if_none_match: Option<String>,
}

impl EditOptions {
    /// Whether the object must not exist.
    pub(crate) fn must_be_new(&self) -> bool {
        self.if_none_match.as_deref() == Some(ANY)
    }
}

/// The tag that every object has.
pub(crate) const ANY: &str = "*";

/// What happens to an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EditOperation {
    /// It has exactly these keys from now on, whether it exists or not.
    Put(Map<String, Value>),
    /// These keys of it change, as a JSON merge patch (RFC 7396): `null` removes a key.
    Set(Map<String, Value>),
    /// It is removed.
    Remove,
}

/// The place of an object in a config: keys and names by turns, as `volume/root` or
/// `iscsi_target/iqn.a/acl/iqn.b`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObjectPath(pub(crate) Vec<String>);

impl fmt::Display for ObjectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

/// The edit in a few words, for actions and the audit log. It has no values: one may be a URL with
/// a password.
impl fmt::Display for ConfigEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.operation {
            EditOperation::Put(_) if self.options.must_be_new() => "add",
            EditOperation::Put(_) => "put",
            EditOperation::Set(_) => "set",
            EditOperation::Remove => "remove",
        };
        write!(f, "{verb} {}", self.path)
    }
}

/// Which objects of a list a client wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListQuery {
    /// Those whose names contain this.
    pub(crate) filter: String,
    /// Those behind this name.
    pub(crate) after: Option<String>,
    /// At most so many.
    pub(crate) limit: Option<usize>,
}

/// Objects of one kind, ordered by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ObjectList {
    pub(crate) items: Vec<ObjectItem>,
    /// There are more: the value of `after` that continues the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
}

/// One object of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ObjectItem {
    pub(crate) name: String,
    /// Its keys, as in the config file.
    #[schema(value_type = Object)]
    pub(crate) object: Value,
}
