//! SRP, as the commands know it: targets over RDMA, which today is iWARP.
//!
//! Unless the config file has `srp_target`s, each volume is a target port of its own, whose
//! identifier is made of the volume's, and in it the only logical unit, LUN 0. SRP has no discovery
//! over RDMA/CM, so `serve` prints the line that Linux's initiator is told.

mod config;
mod live;
mod remote;

use super::frontend::{Frontend, Live, Portal, Service, TargetTables, VolumeNames, Way};
use super::policy::{Policy, TargetAccess};
use super::{Carrier, KeyError, Protocol};
use crate::failure::Failure;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::scsi::{AccessState, TargetPort};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_proto::srp::url::SRP_DEFAULT_PORT;
use blockmux_proto::volume_uuid::VolumeUuid;
use config::{ConfiguredSrpTarget, SrpTargetEntry, WantedSrpTarget};
use live::LiveSrpTargets;
use serde::Deserialize;
use std::any::Any;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use toml::de::Deserializer;

/// SRP over RDMA. It is served only where somebody names an address.
pub(crate) const SRP: Protocol = Protocol {
    name: "srp",
    title: "SRP",
    carrier: Carrier::Stream,
    is_unasked: false,
    listener_help: ["ADDR", "Serve SRP at ADDR, port 5555 unless named; repeatable"],
    port: SRP_DEFAULT_PORT,
    schemes: &[("srp", Transport::Tcp)],
    unspoken_schemes: &[],
    url_forms: &["srp://host/TARGET-PORT-ID/lun"],
    max_description: usize::MAX,
    max_logical_block: 64 << 10,
    // A frame with a command; the head of an RDMA Write and a frame with a response; a frame with a
    // command and the RDMA Read that asks for its data; the answer's head and a response.
    shape: MessageShape { read_request: 88, read_reply_head: 80, write_request_head: 88, write_reply: 112 },
    frontend: || Box::<Srp>::default(),
    remote: remote::of_url,
    served_with: None,
};

/// What the config file says of SRP.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Srp {
    srp_target: Vec<SrpTargetEntry>,
    /// Without any, each volume is a target port of its own.
    #[serde(skip)]
    targets: Vec<ConfiguredSrpTarget>,
}

impl Frontend for Srp {
    fn keys(&self) -> &'static [&'static str] {
        &["srp_target"]
    }

    fn take_keys(&mut self, written: Deserializer<'_>, _directory: &Path) -> Result<(), KeyError> {
        *self = Srp::deserialize(written)?;
        for target in self.srp_target.drain(..) {
            self.targets.push(ConfiguredSrpTarget::prepare(target)?);
        }
        Ok(())
    }

    fn is_configured(&self) -> bool {
        !self.targets.is_empty()
    }

    fn check(&mut self, volumes: &[&str]) -> Result<(), String> {
        let mut ids = HashSet::new();
        for target in &self.targets {
            let id = target.id;
            if !ids.insert(id) {
                return Err(format!("two srp_targets have port_id {id}; change one"));
            }
            if let Some(missing) = target.luns.values().find(|volume| !volumes.contains(&volume.as_str())) {
                return Err(format!(
                    "srp_target `{id}`: there is no volume `{missing}`; add it, or correct `luns`"
                ));
            }
        }
        Ok(())
    }

    fn targets(&self) -> Vec<TargetAccess> {
        self.targets.iter().map(ConfiguredSrpTarget::access).collect()
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn Live>>, Failure> {
        let live = LiveSrpTargets::new(service);
        live.follow(self, service);
        Ok(Some(Box::new(live)))
    }

    fn target_tables(&self) -> &'static [TargetTables] {
        &[TargetTables {
            key: "srp_target",
            name: "port_id",
            units: &["luns"],
            peers: &[("acl", "initiator_port")],
            parts: &[],
        }]
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn ways(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<Way> {
        let Some((_, address)) = portal.tcp() else { return Vec::new() };
        let way = |(id, lun): (SrpPortId, u16)| {
            let digits = id.to_string();
            let (extension, guid) = digits.trim_start_matches("0x").split_at(16);
            let host = "/sys/class/infiniband_srp/srp-*";
            let login = format!("id_ext={extension},ioc_guid={guid},dest={address}");
            Way {
                url: format!("srp://{address}/{digits}/{lun}?rdma=iwarp"),
                commands: vec![format!("echo {login} > \"$(echo {host})/add_target\"")],
                variables: Vec::new(),
            }
        };
        if self.targets.is_empty() {
            return vec![way((own_id(&named.target), 0))];
        }
        let all = self.targets.iter().flat_map(|target| {
            let own = target.luns.iter().filter(|(_, volume)| **volume == named.export);
            own.map(|(lun, _)| (target.id, *lun))
        });
        all.map(way).collect()
    }
}

/// The target port that a volume is where none are configured.
fn own_target(named: &VolumeNames, unit: super::units::Unit, policy: &Policy) -> WantedSrpTarget {
    let luns = BTreeMap::from([(0, unit)]);
    WantedSrpTarget {
        id: own_id(&named.target),
        luns,
        access: vec![(None, None)],
        access_state: AccessState::ACTIVE_OPTIMIZED,
        networks: policy.networks_of(&named.export),
    }
}

/// The identifier of the target port that a volume of this name is: the same after each restart.
fn own_id(name: &str) -> SrpPortId {
    SrpPortId(VolumeUuid::of_texts(&["srp target port", name]).to_bytes())
}

/// A target port. Its number comes from its identifier, so that it differs from those of iSCSI's
/// ports, which are counted from 1, and from other SRP ports' as well as can be.
fn target_port(id: SrpPortId) -> TargetPort {
    let [.., high, low] = id.0;
    let number = 0x8000 | u16::from_be_bytes([high, low]);
    TargetPort { relative_id: number, group: number, name: id.name_string().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configured(text: &str) -> Result<Srp, String> {
        let mut srp = Srp::default();
        let entry: SrpTargetEntry = toml::from_str(text).map_err(|error| error.to_string())?;
        srp.targets.push(ConfiguredSrpTarget::prepare(entry).map_err(|error| error.to_string())?);
        Ok(srp)
    }

    #[test]
    fn a_volume_is_lun_0_of_a_port_of_its_own_or_where_targets_say() {
        let portal = Portal::at("127.0.0.1:5555");
        let [way] = &Srp::default().ways(&SRP, &portal, &VolumeNames::plainly("a"))[..] else {
            panic!("one")
        };
        let id = own_id("a").to_string();
        assert_eq!(way.url, format!("srp://127.0.0.1:5555/{id}/0?rdma=iwarp"));
        assert_ne!(own_id("a"), own_id("b"));
        // Initiators keep it, and so does `cargo xtask peers srp`.
        assert_eq!(own_id("disk0").to_string(), "0x64a8329375c986408e2193b3fe2eb28d");
        let line = format!("id_ext={},ioc_guid={},dest=127.0.0.1:5555", &id[2..18], &id[18..]);
        assert!(way.commands[0].contains(&line), "{}", way.commands[0]);
        let srp = configured(&format!("port_id = '{ID}'\nluns = {{ 3 = 'a', 4 = 'b' }}")).unwrap();
        let [way] = &srp.ways(&SRP, &portal, &VolumeNames::plainly("a"))[..] else { panic!("one") };
        assert_eq!(way.url, format!("srp://127.0.0.1:5555/{ID}/3?rdma=iwarp"));
        assert!(srp.ways(&SRP, &portal, &VolumeNames::plainly("c")).is_empty());
    }

    #[test]
    fn what_is_wrong_with_a_target_is_said() {
        let wrong = |text: &str| configured(text).err().unwrap();
        assert!(wrong("port_id = 'x'\nluns = { 0 = 'a' }").contains("32 hexadecimal digits"));
        assert!(wrong(&format!("port_id = '{ID}'\nluns = {{ x = 'a' }}")).contains("LUNs are numbers"));
        assert!(wrong(&format!("port_id = '{ID}'")).contains("`luns` has to map"));
        let acl = format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = 'y'");
        assert!(wrong(&acl).contains("initiator_port"), "{}", wrong(&acl));
        let twice = format!(
            "port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = '{ID}'\n[[acl]]\ninitiator_port = '{ID}'"
        );
        assert!(wrong(&twice).contains("two acl entries"), "{}", wrong(&twice));
        let mut srp = configured(&format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}")).unwrap();
        assert!(srp.check(&["b"]).unwrap_err().contains("there is no volume `a`"));
        assert_eq!(srp.check(&["a"]), Ok(()));
    }

    #[test]
    fn a_target_with_an_access_list_restricts_its_volumes() {
        let open = configured(&format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}")).unwrap();
        assert!(!open.targets()[0].is_restricted && open.targets()[0].volumes[0].1);
        let text = format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = '{ID}'");
        let closed = configured(&text).unwrap();
        assert!(closed.targets()[0].is_restricted && !closed.targets()[0].volumes[0].1);
    }

    const ID: &str = "0x0123456789abcdef0123456789abcdef";
}
