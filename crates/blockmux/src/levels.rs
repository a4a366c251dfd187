//! Log levels by area: `--verbose` for all areas, `--log` for each.

use crate::protocol::PROTOCOLS;
use blockmux_engine::audit::AUDIT;
use std::str::FromStr;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

/// Requested levels by area.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels(Vec<(&'static Area, LevelFilter)>);

/// An area: its name and its tracing targets.
#[derive(Debug, PartialEq, Eq)]
struct Area {
    name: &'static str,
    targets: &'static [&'static str],
}

const PROTOCOL: &str = "protocol";

/// The areas. A module includes its submodules; all other modules use the level of `--verbose`.
static AREAS: [Area; 5] = [
    Area { name: "audit", targets: &[AUDIT] },
    Area {
        name: PROTOCOL,
        targets: &[
            "blockmux_engine::connection",
            "blockmux_engine::frames",
            "blockmux_engine::listener",
            "blockmux_engine::secure",
            "blockmux_engine::target",
        ],
    },
    Area { name: "initiator", targets: &["blockmux_engine::initiator"] },
    Area {
        name: "volume",
        targets: &["blockmux_engine::channels", "blockmux_engine::file", "blockmux_engine::state"],
    },
    Area { name: "control", targets: &["blockmux::serve"] },
];

impl Area {
    /// The targets of the area, including the engine's modules of the protocols.
    fn all(&self) -> impl Iterator<Item = String> {
        let protocols = PROTOCOLS.iter().filter(|_| self.name == PROTOCOL);
        let modules = protocols.map(|protocol| format!("blockmux_engine::{}", protocol.key()));
        self.targets.iter().map(ToString::to_string).chain(modules)
    }
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
                format!("there is no area `{area}`; write one of {}", names.join(", "))
            })?;
            let level = level.parse().map_err(|_| {
                format!("there is no level `{level}`; write off, error, warn, info, debug or trace")
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
        let asked = self.0.iter().flat_map(|(area, level)| area.all().map(|target| (target, *level)));
        Targets::new().with_default(level).with_target(AUDIT, audit).with_targets(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn a_level_holds_for_its_area_and_no_other() {
        let levels: Levels = "protocol=debug,audit=off".parse().unwrap();
        let targets = levels.targets(0, true);
        for target in
            ["blockmux_engine::target", "blockmux_engine::nvme_tcp", "blockmux_engine::iscsi::portal"]
        {
            assert!(targets.would_enable(target, &Level::DEBUG));
        }
        assert!(!targets.would_enable("blockmux_engine::file::volume", &Level::INFO));
        assert!(!targets.would_enable(AUDIT, &Level::ERROR));
    }

    #[test]
    fn the_audit_log_of_a_daemon_is_on_and_that_of_a_command_has_only_warnings() {
        let is_on = |is_daemon| Levels::default().targets(0, is_daemon).would_enable(AUDIT, &Level::INFO);
        assert!(is_on(true) && !is_on(false));
    }

    #[test]
    fn what_is_no_area_or_level_is_refused_with_what_there_is() {
        let refusal = |text: &str| text.parse::<Levels>().unwrap_err();
        assert!(refusal("protocol").contains("is not AREA=LEVEL"));
        assert!(refusal("wire=debug").contains("audit, protocol, initiator, volume, control"));
        assert!(refusal("audit=loud").contains("off, error, warn"));
    }
}
