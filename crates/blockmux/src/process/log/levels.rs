//! Log levels by area: `--verbose` sets all of them, `--log` single ones, and `ctl log` changes
//! them while a daemon runs.

use blockmux_engine::serve::audit::AUDIT;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::reload::{Handle, Layer};

/// Requested levels by area.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels(Vec<(&'static Area, LevelFilter)>);

/// An area: its name and its tracing targets.
#[derive(Debug, PartialEq, Eq)]
struct Area {
    name: &'static str,
    targets: &'static [&'static str],
}

/// The areas. A module includes its submodules, unless these have an area of their own; all other
/// modules use the level of `--verbose`.
static AREAS: [Area; 5] = [
    Area { name: "audit", targets: &[AUDIT] },
    Area {
        name: "protocol",
        targets: &[
            "blockmux_engine::attach",
            "blockmux_engine::protocol",
            "blockmux_engine::carrier::connection",
            "blockmux_engine::net::frames",
            "blockmux_engine::serve::listener",
            "blockmux_engine::carrier::tls",
            "blockmux_engine::serve::target_task",
        ],
    },
    Area {
        name: "initiator",
        targets: &[
            "blockmux_engine::remote",
            "blockmux_engine::protocol::iscsi::initiator",
            "blockmux_engine::protocol::nvme::identity_order",
            "blockmux_engine::protocol::nvme::initiator",
            "blockmux_engine::protocol::scsi_unit",
            "blockmux_engine::protocol::srp::initiator",
        ],
    },
    Area {
        name: "volume",
        targets: &[
            "blockmux_engine::serve::channels",
            "blockmux_engine::volume::file",
            "blockmux_engine::volume::state",
            "blockmux_engine::volume::state_writer",
        ],
    },
    Area { name: "control", targets: &["blockmux::attach", "blockmux::daemon"] },
];

/// The name of the area that a tracing target belongs to.
pub(super) fn area_of(target: &str) -> Option<&'static str> {
    let is_below = |module: &str| {
        target.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let all =
        AREAS.iter().flat_map(|area| area.targets.iter().map(move |module| (module.len(), area, module)));
    let found = all.filter(|(_, _, module)| is_below(module)).max_by_key(|(len, ..)| *len);
    found.map(|(_, area, _)| area.name)
}

impl FromStr for Levels {
    type Err = String;

    fn from_str(text: &str) -> Result<Levels, String> {
        let each = text.split(',').map(|item| {
            let wrong = || format!("`{item}` is not AREA=LEVEL, as in protocol=debug");
            let (area, level) = item.split_once('=').ok_or_else(wrong)?;
            let found = AREAS.iter().find(|known| known.name == area);
            let area = found.ok_or_else(|| {
                let names: Vec<_> = AREAS.iter().map(|area| area.name).collect();
                format!("`{area}` is not a log area; use one of {}", names.join(", "))
            })?;
            let level = level.parse().map_err(|_| {
                format!("`{level}` is not a log level; use off, error, warn, info, debug or trace")
            })?;
            Ok((area, level))
        });
        each.collect::<Result<_, _>>().map(Levels)
    }
}

impl Levels {
    /// The filter for this number of `--verbose`. A daemon's audit log is enabled by default.
    pub(crate) fn targets(&self, verbose: u8, is_daemon: bool) -> Targets {
        let level = match verbose {
            0 => LevelFilter::WARN,
            1 => LevelFilter::INFO,
            2 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        };
        let audit = if is_daemon { level.max(LevelFilter::INFO) } else { level };
        let asked =
            self.0.iter().flat_map(|(area, level)| area.targets.iter().map(|target| (*target, *level)));
        Targets::new().with_default(level).with_target(AUDIT, audit).with_targets(asked)
    }
}

/// The levels of this process, which can be changed while it runs.
struct CurrentLevels {
    verbose: u8,
    is_daemon: bool,
    levels: Mutex<Levels>,
    filter: Handle<Targets, Registry>,
}

static CURRENT: OnceLock<CurrentLevels> = OnceLock::new();

/// The filter of this process's log; [`change`] changes it.
pub(crate) fn filter(levels: Levels, verbose: u8, is_daemon: bool) -> Layer<Targets, Registry> {
    let (layer, filter) = Layer::new(levels.targets(verbose, is_daemon));
    CURRENT.get_or_init(|| CurrentLevels { verbose, is_daemon, levels: Mutex::new(levels), filter });
    layer
}

/// Sets the levels of some areas; the others stay. Returns the levels of all areas.
///
/// # Errors
/// If this process has no log.
pub(crate) fn change(changed: Levels) -> Result<Vec<(&'static str, String)>, String> {
    let current = CURRENT.get().ok_or("this process has no log")?;
    let mut levels = current.levels.lock().unwrap_or_else(PoisonError::into_inner);
    let is_changed = |area: &Area| changed.0.iter().any(|(other, _)| other.name == area.name);
    levels.0.retain(|(area, _)| !is_changed(area));
    levels.0.extend(changed.0);
    let targets = levels.targets(current.verbose, current.is_daemon);
    let of = |area: &Area| area.targets.first().map(|target| level_of(&targets, target));
    let all = AREAS.iter().filter_map(|area| Some((area.name, of(area)?))).collect();
    current.filter.reload(targets).map_err(|error| error.to_string())?;
    Ok(all)
}

/// The level at which a target is logged.
fn level_of(targets: &Targets, target: &str) -> String {
    let levels = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
    let found = levels.iter().find(|level| targets.would_enable(target, level));
    found.map_or_else(|| "off".to_owned(), |level| level.as_str().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_applies_to_its_area_only() {
        let levels: Levels = "protocol=debug,audit=off".parse().unwrap();
        let targets = levels.targets(0, true);
        for target in [
            "blockmux_engine::serve::target_task",
            "blockmux_engine::protocol::nvme::target",
            "blockmux_engine::protocol::iscsi::target::portal",
        ] {
            assert!(targets.would_enable(target, &Level::DEBUG));
            assert_eq!(area_of(target), Some("protocol"));
        }
        assert_eq!(area_of("blockmux_engine::protocol::nvme::initiator"), Some("initiator"));
        assert_eq!(area_of("blockmux_engine::protocols"), None);
        assert!(!targets.would_enable("blockmux_engine::volume::file::volume", &Level::INFO));
        assert!(!targets.would_enable(AUDIT, &Level::ERROR));
    }

    #[test]
    fn the_audit_log_is_on_in_a_daemon_and_has_only_warnings_in_other_commands() {
        let is_on = |is_daemon| Levels::default().targets(0, is_daemon).would_enable(AUDIT, &Level::INFO);
        assert!(is_on(true) && !is_on(false));
    }

    #[test]
    fn an_unknown_area_or_level_is_refused_with_the_known_ones() {
        let refusal = |text: &str| text.parse::<Levels>().unwrap_err();
        assert!(refusal("protocol").contains("is not AREA=LEVEL"));
        assert!(refusal("wire=debug").contains("audit, protocol, initiator, volume, control"));
        assert!(refusal("audit=loud").contains("off, error, warn"));
    }
}
