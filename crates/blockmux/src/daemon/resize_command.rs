//! The command that resizes a volume: what it refuses, and what happens after it was given up.

use super::blocking_work::Awaited;
use super::config_audit::{self, Caller};
use super::control::{Changed, ControlServer};
use super::identity::{served_data, warn_of_same_data};
use super::reload::Reloader;
use super::setup::LARGEST;
use crate::api::request::{Answer, Request};
use crate::api::{ApiError, ErrorCode};
use crate::data::layers;
use crate::data::part::DataPart;
use crate::failure::Failure;
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::{Beyond, Resize, ResizeError};
use std::sync::Arc;

impl ControlServer {
    /// Resizes a volume, without the right to change the daemon, because its path may hang.
    pub(super) fn resize(
        &self,
        request: &Request,
        caller: &Caller,
        name: &str,
        size: Option<u64>,
        beyond: Beyond,
    ) -> Result<Changed, ApiError> {
        let (_, volume_state) = self.find(name)?;
        let before = volume_state.volume().info().size;
        if size.is_some_and(|size| size > LARGEST) {
            let text = format!("{name}: clients support at most 2^63 - 1 bytes; choose a smaller size");
            return Err(ApiError::invalid(text));
        }
        // A longer slice may overlap others.
        let parts_before = self.policy.data_of(name);
        if let Some(resized) = size.and_then(|size| self.reloader.spec(name)?.with_size(size)) {
            let parts = self.reloader.blocking.run(name, move || layers::of_spec(&resized))?;
            self.policy.set_data(name, parts);
        }
        let checked = {
            let _changing = self.reloader.begin_change();
            self.policy
                .check_same_data()
                .and_then(|()| size.map_or(Ok(()), |size| self.check_cut(name, size, before)))
        };
        let to = size.map_or(Resize::Own, |size| Resize::Bytes { size, beyond });
        let resized = checked.map_err(ApiError::from).and_then(|()| {
            let late = LateResize {
                reloader: self.reloader.clone(),
                volume_state: volume_state.clone(),
                request: request.clone(),
                caller: caller.clone(),
                name: name.to_owned(),
                before,
                parts: self.policy.data_of(name),
            };
            let work = move |awaited: &Awaited| {
                // A path that hangs usually does so here, where nothing has happened.
                volume_state.volume().deleted_file();
                awaited.begin()?;
                Ok(volume_state.resize(to))
            };
            let late = move |resized: Result<_, Failure>| {
                if let Ok(resized) = resized {
                    late.record(resized);
                }
            };
            let resized = self.reloader.blocking.run_change(name, work, late)?;
            resized?.map_err(|error| cannot_resize(name, &error))
        });
        let size = resized.inspect_err(|_| self.policy.set_data(name, parts_before.clone()))?;
        if self.policy.data_of(name) != parts_before {
            let all: Vec<_> = self.exports.iter().collect();
            let all = served_data(&all, &self.exports, &self.policy);
            warn_of_same_data(&all, |pair| pair.contains(&name));
        }
        let changing = self.reloader.begin_change();
        let note = self.reloader.record_size(&changing, name, size);
        Ok(Changed {
            answer: Answer::Resized { size }.noted(note),
            effects: vec![resized_line(name, before, size)],
        })
    }

    /// Checks that a shorter volume takes no data from others in the same file.
    fn check_cut(&self, name: &str, size: u64, before: u64) -> Result<(), String> {
        let Some(spec) = self.reloader.spec(name).filter(|_| size < before) else { return Ok(()) };
        let Some(cut) = DataPart::cut(&spec, &self.policy.data_of(name), size) else { return Ok(()) };
        let is_in = |other: &str| self.policy.data_of(other).iter().any(|part| part.overlaps(&cut));
        let exports: Vec<_> = self.exports.iter().collect();
        let others = exports.iter().map(|(_, export)| &*export.name);
        let others: Vec<_> =
            others.filter(|other| *other != name && is_in(other)).map(|other| format!("`{other}`")).collect();
        match others.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "volume `{name}`: the end of its file would be cut off, which {} use{}, too; remove what should lose \
                 its data first",
                others.join(", "),
                if others.len() == 1 { "s" } else { "" },
            )),
        }
    }
}

/// A resize whose command may be given up before it has happened.
struct LateResize {
    reloader: Arc<Reloader>,
    volume_state: Arc<VolumeState>,
    request: Request,
    caller: Caller,
    name: String,
    /// The size before, in bytes.
    before: u64,
    /// What the volume uses with its new size.
    parts: Vec<DataPart>,
}

impl LateResize {
    /// Records and logs what has happened after the command was given up.
    fn record(self, resized: Result<u64, ResizeError>) {
        let LateResize { reloader, volume_state, request, caller, name, before, parts } = self;
        let what = format!("{request}, given up before");
        let size = match resized {
            Ok(size) => size,
            Err(error) => return config_audit::log(&caller, &what, Err(&cannot_resize(&name, &error))),
        };
        let changing = reloader.begin_change();
        let found = reloader.exports.find(&name).and_then(|(id, _)| reloader.exports.volume_state(id));
        // Another volume may have the name by now.
        if found.is_some_and(|found| Arc::ptr_eq(&found, &volume_state)) {
            reloader.policy.set_data(&name, parts);
            reloader.record_size(&changing, &name, size);
        }
        config_audit::log(&caller, &what, Ok(&[resized_line(&name, before, size)]));
    }
}

/// The effect of a resize, in the words of a plan.
fn resized_line(name: &str, before: u64, after: u64) -> String {
    format!("~ volume {name}: size: {before} -> {after}")
}

fn cannot_resize(name: &str, error: &ResizeError) -> ApiError {
    let code = match error {
        ResizeError::Fixed | ResizeError::ReadOnly | ResizeError::WouldLose { .. } => ErrorCode::Conflict,
        ResizeError::BadSize { .. } | ResizeError::TooLarge { .. } => ErrorCode::Invalid,
        ResizeError::System { .. } => ErrorCode::Failed,
    };
    ApiError::new(code, format!("{name}: {error}"))
}
