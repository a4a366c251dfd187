//! Changes of objects that take effect together, and who has to agree to them.

use super::objects::Objects;
use super::plan::{Schema, check_not_used};
use super::resize::AskedResize;
use super::uses;
use crate::api::ApiError;
use crate::api::edit::{ConfigEdit, EditOperation};
use crate::daemon::attachment::ATTACHMENTS;
use crate::daemon::setup::VOLUMES;
use crate::protocol::Frontends;
use std::collections::BTreeSet;
use toml::{Table, Value};

/// Changes of objects that take effect together.
#[derive(Clone, Default)]
pub(in crate::daemon) struct Edits {
    pub(super) objects: Vec<ConfigEdit>,
    /// Also if sessions use what changes, or everybody gets access.
    pub(super) force: bool,
    pub(super) consent: Consent,
    /// A volume whose name is generated, which the config file does not get.
    pub(super) unnamed: Option<String>,
    /// Volumes that targets lose.
    pub(super) detached: Vec<String>,
    pub(super) resize: Option<AskedResize>,
    /// Default targets, which are written into lists that are empty, each with its key.
    pub(super) default_targets: Vec<(&'static str, Vec<Table>)>,
}

/// Takes what a change waits for, for people.
pub(in crate::daemon) type ChangeProgress<'a> = dyn Fn(String) + 'a;

/// Whether edits that take away what sessions use must be forced.
#[derive(Clone, Default)]
pub(super) enum Consent {
    /// They need not be.
    #[default]
    Given,
    /// They must be; a refusal says this about them.
    Asked { name: String, verb: &'static str },
}

impl From<&ConfigEdit> for Edits {
    fn from(edit: &ConfigEdit) -> Edits {
        Edits {
            objects: vec![edit.clone()],
            force: edit.options.force,
            consent: Consent::Asked { name: edit.path.to_string(), verb: "change" },
            ..Edits::default()
        }
    }
}

impl Edits {
    /// The volume that they remove. Nobody removes a volume without knowing that its data in RAM
    /// goes with it.
    pub(super) fn removed_volume(&self) -> Option<&str> {
        self.objects.iter().find_map(|edit| match (&edit.path.0[..], &edit.operation) {
            ([list, name], EditOperation::Remove) if list == VOLUMES.0 => Some(&**name),
            _ => None,
        })
    }

    /// Whether they attach a volume as a disk, perhaps as the config says already.
    pub(super) fn attaches(&self, volume: &str) -> bool {
        self.objects.iter().any(|edit| match (&edit.path.0[..], &edit.operation) {
            ([list, name], EditOperation::Put(_)) => list == ATTACHMENTS.0 && name == volume,
            _ => false,
        })
    }

    /// Checks that they may do what they do, given the sessions that they affect.
    ///
    /// # Errors
    /// If they take away what sessions use without being forced to.
    pub(super) fn check_consent(&self, affected: impl FnOnce() -> BTreeSet<String>) -> Result<(), ApiError> {
        let Consent::Asked { name, verb } = &self.consent else { return Ok(()) };
        if self.force {
            return Ok(());
        }
        check_not_used(name, verb, &affected().into_iter().collect::<Vec<_>>())
    }

    /// Makes them in a config.
    pub(super) fn write(
        &self,
        schema: &Schema,
        frontends: &Frontends,
        table: &mut Table,
    ) -> Result<(), ApiError> {
        for (key, targets) in &self.default_targets {
            let targets = targets.iter().cloned().map(Value::Table);
            table.insert((*key).to_owned(), Value::Array(targets.collect()));
        }
        for ConfigEdit { path, operation, options } in &self.objects {
            Objects::new(schema, table).edit(path, operation, options)?;
            if *operation == EditOperation::Remove {
                uses::remove_uses(table, frontends, path);
            }
        }
        Ok(())
    }
}
