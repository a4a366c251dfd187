//! The formats that can be imported, and how their files are recognized.

use super::ctld;
use super::lio;
use super::members::Members;
use super::model::Imported;
use super::nbd_server;
use super::nvmet;
use super::parameters;
use super::scst;
use super::source::SourceText;
use super::spdk;
use super::tgt;
use super::tree::{self, Statement, SyntaxError};
use crate::failure::Failure;
use serde_json::Value;

/// A config format of another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForeignFormat {
    Lio,
    Tgt,
    Nvmet,
    NbdServer,
    Spdk,
    Scst,
    Ctld,
}

impl ForeignFormat {
    /// The program, as messages name it.
    pub(super) fn title(self) -> &'static str {
        match self {
            ForeignFormat::Lio => "LIO (targetcli)",
            ForeignFormat::Tgt => "tgt",
            ForeignFormat::Nvmet => "nvmet (nvmetcli)",
            ForeignFormat::NbdServer => "nbd-server",
            ForeignFormat::Spdk => "SPDK",
            ForeignFormat::Scst => "SCST",
            ForeignFormat::Ctld => "ctld",
        }
    }

    /// The usual name of its file.
    pub(super) fn file(self) -> &'static str {
        match self {
            ForeignFormat::Lio => "saveconfig.json",
            ForeignFormat::Tgt => "targets.conf",
            ForeignFormat::Nvmet => "config.json",
            ForeignFormat::NbdServer => "the config",
            ForeignFormat::Spdk => "save_config",
            ForeignFormat::Scst => "scst.conf",
            ForeignFormat::Ctld => "ctl.conf",
        }
    }

    /// The format of a text; `None` if it is none of these, or not valid JSON.
    pub(super) fn of(source: &SourceText) -> Option<ForeignFormat> {
        if is_json(source) {
            return ForeignFormat::of_json(&serde_json::from_str(source.text()).ok()?);
        }
        TEXT_FORMATS.iter().find(|format| (format.is_own)(source.text())).map(|format| format.format)
    }

    fn of_json(value: &Value) -> Option<ForeignFormat> {
        let members = value.as_object()?;
        let has = |key: &str| members.get(key).is_some_and(Value::is_array);
        // Both SPDK and nvmetcli have a list of subsystems: those of the program, or those of NVMe.
        let subsystems = members.get("subsystems").and_then(Value::as_array);
        let is_spdk = subsystems.is_some_and(|all| all.iter().any(|own| own.get("subsystem").is_some()))
            || members.contains_key("subsystem") && has("config");
        if has("storage_objects") || has("targets") {
            Some(ForeignFormat::Lio)
        } else if is_spdk {
            Some(ForeignFormat::Spdk)
        } else {
            (subsystems.is_some() && (has("ports") || has("hosts"))).then_some(ForeignFormat::Nvmet)
        }
    }
}

/// A format of statements.
struct TextFormat {
    format: ForeignFormat,
    is_own: fn(&str) -> bool,
    read: fn(&SourceText) -> Result<Imported, Failure>,
}

/// Reads a foreign config.
///
/// # Errors
/// If the format is unknown, or the text does not follow it.
pub(super) fn import(source: &SourceText) -> Result<(ForeignFormat, Imported), Failure> {
    let unknown = || {
        let name = source.path().display();
        Failure::request(format!("{name}: is no config that can be imported; give {ACCEPTED_FORMATS}"))
    };
    let (format, mut imported) = if is_json(source) {
        let value: Value = serde_json::from_str(source.text()).map_err(|error| {
            let what = error.to_string();
            let what = what.split(" at line ").next().unwrap_or_default();
            source.wrong(error.line(), &format!("is not valid JSON: {what}"))
        })?;
        let format = ForeignFormat::of_json(&value).ok_or_else(unknown)?;
        let members = Members::of(value).unwrap_or_default();
        let imported = match format {
            ForeignFormat::Lio => lio::read(members),
            ForeignFormat::Nvmet => nvmet::read(members),
            _ => spdk::read(members),
        };
        (format, imported)
    } else {
        let own = TEXT_FORMATS.iter().find(|format| (format.is_own)(source.text())).ok_or_else(unknown)?;
        (own.format, (own.read)(source)?)
    };
    imported.settle();
    imported.targets.iter_mut().for_each(parameters::settle);
    Ok((format, imported))
}

fn is_json(source: &SourceText) -> bool {
    source.text().trim_start().starts_with('{')
}

/// Whether a statement of the text is one of a format. A text with a syntax error is recognized by
/// the statements of its lines, so that the error is shown.
fn has(
    text: &str,
    read: impl Fn(&str) -> Result<Vec<Statement>, SyntaxError>,
    is_own: impl Fn(&Statement) -> bool,
) -> bool {
    match read(text) {
        Ok(statements) => statements.iter().any(is_own),
        Err(_) => text.lines().any(|line| {
            // The beginning of a block, with an end.
            let ends = ["", "}", "\n</>"];
            ends.iter().any(|end| read(&format!("{line}{end}")).is_ok_and(|all| all.iter().any(&is_own)))
        }),
    }
}

/// Formats that are not JSON.
const TEXT_FORMATS: [TextFormat; 4] = [
    TextFormat {
        format: ForeignFormat::Tgt,
        is_own: |text| has(text, tree::tags, tgt::is_own),
        read: tgt::read,
    },
    TextFormat {
        format: ForeignFormat::NbdServer,
        is_own: |text| has(text, tree::sections, nbd_server::is_own),
        read: nbd_server::read,
    },
    TextFormat {
        format: ForeignFormat::Scst,
        is_own: |text| has(text, tree::braces, scst::is_own),
        read: scst::read,
    },
    TextFormat {
        format: ForeignFormat::Ctld,
        is_own: |text| has(text, tree::braces, ctld::is_own),
        read: ctld::read,
    },
];

/// The formats, for a message.
const ACCEPTED_FORMATS: &str = "saveconfig.json of targetcli, targets.conf of tgt or the output of tgt-admin --dump, \
                                JSON of nvmetcli or of SPDK's save_config, the config of nbd-server, scst.conf, or ctl.conf";
