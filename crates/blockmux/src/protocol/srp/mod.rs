//! SRP over RDMA: its properties, its frontend for `serve`, and its URLs.
//!
//! Without `srp_target` in the config file, each volume has its own target port, in which it is
//! LUN 0; the port's identifier is derived from the volume's name. SRP has no discovery over
//! RDMA/CM, so `serve` prints the line that Linux's initiator needs.

mod config;
mod live;
mod remote;

use super::configured::{ConfiguredTargets, HasVolumes};
use super::frontend::{ConnectInfo, Frontend, LiveFrontend, Portal, Service, TargetTables, VolumeNames};
use super::lun_map::WantedLuns;
use super::policy::{Policy, TargetAccess};
use super::{Carrier, KeyError, Protocol};
use crate::failure::Failure;
use crate::process::machine::machine_id;
use blockmux_engine::net::zone;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::names::rdma::UDP_TARGET_QUERY;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::scsi::{AccessState, TargetPort};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_proto::srp::url::SRP_DEFAULT_PORT;
use config::{ConfiguredSrpTarget, SrpTargetEntry, WantedSrpTarget};
use live::LiveSrpTargets;
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use toml::de::Deserializer;

/// SRP over RDMA. It is served at configured addresses only.
pub(crate) const SRP: Protocol = Protocol {
    name: "srp",
    title: "SRP",
    carrier: Carrier::Stream,
    is_default: false,
    has_rdma: true,
    is_over_rdma: true,
    listener_help: ["ADDR", "Serve SRP at ADDR (default port 5555); repeatable"],
    port: SRP_DEFAULT_PORT,
    schemes: &[("srp", Transport::Tcp)],
    unsupported_schemes: &[],
    url_forms: &["srp://host/TARGET-PORT-ID/lun"],
    max_description: usize::MAX,
    max_logical_block: 64 << 10,
    // A frame with a command; the head of an RDMA Write and a frame with a response; a frame with a
    // command and the RDMA Read Request for its data; the response's head and a response.
    shape: MessageShape { read_request: 88, read_reply_head: 80, write_request_head: 88, write_reply: 112 },
    frontend: || Box::<Srp>::default(),
    remote: remote::of_url,
    served_with: None,
    service_type: None,
};

/// The frontend of SRP: the keys of the config file, and the validated targets.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Srp {
    srp_target: Vec<SrpTargetEntry>,
    /// The configured targets; if it is empty, each volume has its own target port.
    #[serde(skip)]
    targets: ConfiguredTargets<ConfiguredSrpTarget>,
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
        let mut numbers = BTreeMap::new();
        let known: HashSet<&str> = volumes.iter().copied().collect();
        for target in self.targets.iter() {
            let id = target.id;
            match numbers.insert(port_number(id), id) {
                Some(other) if other == id => {
                    return Err(format!("two srp_targets have port_id {id}; change one"));
                }
                Some(other) => {
                    return Err(format!(
                        "srp_targets `{other}` and `{id}`: both port_ids result in relative target port \
                         identifier {}; change one",
                        port_number(id)
                    ));
                }
                None => {}
            }
            if let Some(missing) = target.volumes().find(|volume| !known.contains(volume)) {
                return Err(format!(
                    "srp_target `{id}`: no volume has the name `{missing}`; add it, or correct `luns`"
                ));
            }
        }
        Ok(())
    }

    fn targets(&self) -> Vec<TargetAccess> {
        self.targets.iter().map(ConfiguredSrpTarget::access).collect()
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        let live = LiveSrpTargets::new(service);
        live.reconfigure(self, service);
        Ok(Some(Box::new(live)))
    }

    fn target_tables(&self) -> &'static [TargetTables] {
        &[TargetTables {
            key: "srp_target",
            name: "port_id",
            units: &["luns"],
            first_unit: 0,
            peers: &[("acl", "initiator_port")],
            parts: &[],
            port_name: None,
        }]
    }

    fn own_entry(&self, named: &VolumeNames, _description: &str) -> Option<toml::Table> {
        let luns = toml::Table::from_iter([("0".to_owned(), named.export.as_str().into())]);
        let id = own_id(&named.target).to_string().into();
        Some(toml::Table::from_iter([("port_id".to_owned(), id), ("luns".to_owned(), luns.into())]))
    }

    fn connect_info(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo> {
        let Some((_, address)) = portal.tcp() else { return Vec::new() };
        let (place, dest) = (zone::url_host(&address), zone::address_text(&address));
        let way = |(id, lun): (SrpPortId, u16)| {
            let digits = id.to_string();
            let (extension, guid) = digits.trim_start_matches("0x").split_at(16);
            let port = format!("id_ext={extension},ioc_guid={guid}");
            let own = own_parameters(portal.rdma_query);
            let host = "/sys/class/infiniband_srp/srp-*";
            ConnectInfo {
                url: format!("srp://{place}:{}/{digits}/{lun}{}", address.port(), portal.rdma_query),
                commands: vec![format!("echo {port},{own},dest={dest} > \"$(echo {host})/add_target\"")],
                note: Some(format!("# srp_daemon finds no target over RDMA/CM; its rule would be: a {port}")),
                ..ConnectInfo::default()
            }
        };
        if self.targets.is_empty() {
            return vec![way((own_id(&named.target), 0))];
        }
        let all = self
            .targets
            .having(&named.export)
            .flat_map(|target| target.luns_of(&named.export).into_iter().map(|lun| (target.id, lun)));
        all.map(way).collect()
    }
}

/// What Linux's initiator has to be told beside the target port.
fn own_parameters(rdma_query: &str) -> &'static str {
    if rdma_query == UDP_TARGET_QUERY {
        // rxe takes the default of 7 retries for any number, and would not notice a lost target.
        return "tl_retry_count=3";
    }
    // A software iWARP device has its MAC address in the first half of its GID and zeros in the
    // second. Linux uses the second half as the initiator port's GUID, so without an extension all
    // machines would have the same initiator port identifier.
    "initiator_ext=$(cat /sys/class/infiniband/*/ports/1/gids/0 | head -1 | tr -d : | cut -c1-16)"
}

/// A volume's own target port, if no targets are configured.
fn own_target(named: &VolumeNames, unit: super::units::VolumeUnit, policy: &Policy) -> WantedSrpTarget {
    WantedSrpTarget {
        id: own_id(&named.target),
        access: vec![(None, WantedLuns::one(unit))],
        access_state: AccessState::ACTIVE_OPTIMIZED,
        networks: policy.networks_of(&named.export),
    }
}

/// The identifier of the target port of a volume with this name on this machine; it is the same
/// after a restart. Linux refuses to log in to two ports with one identifier, so it must not be
/// that of the volume with this name on another machine.
fn own_id(name: &str) -> SrpPortId {
    id_on(&machine_id(), name)
}

fn id_on(machine: &str, name: &str) -> SrpPortId {
    SrpPortId(VolumeUuid::of_texts(&["srp target port", machine, name]).to_bytes())
}

/// A target port. Its relative target port identifier is also the number of its target port group.
fn target_port(id: SrpPortId) -> TargetPort {
    let number = port_number(id);
    TargetPort { relative_id: number, group: number, name: id.name_string().into() }
}

/// The relative target port identifier of a target port. It is derived from all bytes of the port's
/// identifier, so that it differs from those of iSCSI's ports, which count from 1, and most likely
/// from those of other SRP ports.
fn port_number(id: SrpPortId) -> u16 {
    let (pairs, _) = id.0.as_chunks::<2>();
    0x8000 | pairs.iter().fold(0, |number: u16, pair| number.rotate_left(3) ^ u16::from_be_bytes(*pair))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::policy::PublicAccess;
    use blockmux_proto::srp::node::{SrpInitiators, SrpNode};

    fn configured(text: &str) -> Result<Srp, String> {
        let mut srp = Srp::default();
        let entry: SrpTargetEntry = toml::from_str(text).map_err(|error| error.to_string())?;
        srp.targets.push(ConfiguredSrpTarget::prepare(entry).map_err(|error| error.to_string())?);
        Ok(srp)
    }

    #[test]
    fn a_volume_is_lun_0_of_its_own_port_or_where_targets_map_it() {
        let portal = Portal::at("127.0.0.1:5555");
        let [way] = &Srp::default().connect_info(&SRP, &portal, &VolumeNames::plainly("a"))[..] else {
            panic!("one")
        };
        let id = own_id("a").to_string();
        assert_eq!(way.url, format!("srp://127.0.0.1:5555/{id}/0?rdma=iwarp"));
        assert_ne!(own_id("a"), own_id("b"));
        assert_ne!(id_on("one", "a"), id_on("other", "a"));
        // Initiators store the identifier, so it must never change.
        assert_eq!(id_on("one", "disk0").to_string(), "0xc16af0b5ea04856282fba5727cf2f464");
        let port = format!("id_ext={},ioc_guid={}", &id[2..18], &id[18..]);
        let own =
            "initiator_ext=$(cat /sys/class/infiniband/*/ports/1/gids/0 | head -1 | tr -d : | cut -c1-16)";
        let line = format!("echo {port},{own},dest=127.0.0.1:5555 > ");
        assert!(way.commands[0].starts_with(&line), "{}", way.commands[0]);
        assert_eq!(way.commands.len(), 1);
        assert!(way.note.as_ref().unwrap().ends_with(&format!("its rule would be: a {port}")));
        let roce = Portal { rdma_query: UDP_TARGET_QUERY, ..portal.clone() };
        let [way] = &Srp::default().connect_info(&SRP, &roce, &VolumeNames::plainly("a"))[..] else {
            panic!("one")
        };
        assert!(way.url.ends_with("/0?rdma=roce"), "{}", way.url);
        let line = format!("echo {port},tl_retry_count=3,dest=127.0.0.1:5555 > ");
        assert!(way.commands[0].starts_with(&line), "{}", way.commands[0]);
        let srp = configured(&format!("port_id = '{ID}'\nluns = {{ 3 = 'a', 4 = 'b' }}")).unwrap();
        let [way] = &srp.connect_info(&SRP, &portal, &VolumeNames::plainly("a"))[..] else { panic!("one") };
        assert_eq!(way.url, format!("srp://127.0.0.1:5555/{ID}/3?rdma=iwarp"));
        assert!(srp.connect_info(&SRP, &portal, &VolumeNames::plainly("c")).is_empty());
    }

    #[test]
    fn an_invalid_target_is_refused() {
        let wrong = |text: &str| configured(text).err().unwrap();
        assert!(wrong("port_id = 'x'\nluns = { 0 = 'a' }").contains("32 hexadecimal digits"));
        assert!(wrong(&format!("port_id = '{ID}'\nluns = {{ x = 'a' }}")).contains("LUNs are numbers"));
        assert!(configured(&format!("port_id = '{ID}'")).is_ok(), "it gets its LUNs later");
        let acl = format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = 'y'");
        assert!(wrong(&acl).contains("initiator_port"), "{}", wrong(&acl));
        let twice = format!(
            "port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = '{ID}'\n[[acl]]\ninitiator_port = '{ID}'"
        );
        assert!(wrong(&twice).contains("two acl entries"), "{}", wrong(&twice));
        let mut srp = configured(&format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}")).unwrap();
        assert!(srp.check(&["b"]).unwrap_err().contains("no volume has the name `a`"));
        assert_eq!(srp.check(&["a"]), Ok(()));
    }

    #[test]
    fn target_ports_that_differ_in_any_half_have_other_numbers() {
        let port = |extension: &str, guid: &str| {
            target_port(SrpPortId::parse(&format!("{extension}{guid}")).unwrap())
        };
        let first = port("1111111111111111", "2222222222222222");
        for other in
            [port("1111111111111112", "2222222222222222"), port("1111111111111111", "2222222222222223")]
        {
            assert_ne!(first.relative_id, other.relative_id);
            assert_eq!(other.relative_id, other.group);
            assert!(other.relative_id >= 0x8000);
        }
    }

    #[test]
    fn two_targets_whose_ports_have_the_same_number_are_refused() {
        // They differ only in the bit that every relative identifier has set.
        let mut srp = configured(&format!("port_id = '{}'\nluns = {{ 0 = 'a' }}", "0".repeat(32))).unwrap();
        let text = format!("port_id = '{}8000'\nluns = {{ 0 = 'a' }}", "0".repeat(28));
        srp.targets.push(configured(&text).unwrap().targets[0].clone());
        let error = srp.check(&["a"]).unwrap_err();
        assert!(error.contains("relative target port identifier 32768; change one"), "{error}");
        let twice = srp.targets[0].clone();
        srp.targets = [twice.clone(), twice].into_iter().collect();
        assert!(srp.check(&["a"]).unwrap_err().contains("two srp_targets have port_id"));
    }

    #[test]
    fn an_acl_entry_of_one_port_comes_before_those_of_its_guid() {
        let text = format!(
            "port_id = '{ID}'\nluns = {{ 0 = 'a', 1 = 'b' }}\n[[acl]]\ninitiator_port = '0123456789abcdef'\nluns = [0]\n\
             [[acl]]\ninitiator_port = '{ID}'\nluns = [1]"
        );
        let target = configured(&text).unwrap().targets[0].clone();
        let node = SrpNode::new(Vec::new());
        let made = target.wanted(|_| None, &Policy::default()).make(None, &node);
        let initiators: Vec<_> = made.access.iter().map(|access| access.initiator).collect();
        let guid = SrpInitiators::parse("0123456789abcdef");
        assert_eq!(initiators, [SrpInitiators::parse(ID), guid]);
    }

    #[test]
    fn an_acl_entry_may_have_its_own_luns() {
        use blockmux_proto::exports::VolumeId;
        use blockmux_proto::scsi::{LogicalUnit, UnitIdentity};
        use blockmux_volume::MemVolume;
        use std::sync::Arc;
        let text = format!(
            "port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = '0123456789abcdef'\n\
             [[acl]]\ninitiator_port = '{ID}'\nluns = {{ 1 = 'b', 7 = {{ volume = 'a', read_only = true }} }}"
        );
        let mut srp = configured(&text).unwrap();
        assert!(srp.check(&["a"]).unwrap_err().contains("no volume has the name `b`"));
        let portal = Portal::at("127.0.0.1:5555");
        let luns = srp.connect_info(&SRP, &portal, &VolumeNames::plainly("a")).into_iter().map(|way| way.url);
        assert!(luns.eq([0, 7].map(|lun| format!("srp://127.0.0.1:5555/{ID}/{lun}?rdma=iwarp"))));
        let unit = |name: &str| {
            let id = VolumeId(u32::from(name == "b"));
            Some((id, LogicalUnit::new(UnitIdentity::of(name), Arc::new(MemVolume::new(1 << 20)))))
        };
        let made = srp.targets[0].wanted(unit, &Policy::default()).make(None, &SrpNode::new(Vec::new()));
        let seen = |at: usize| {
            let view = &made.access[at].target;
            let numbers: Vec<_> = view.units().map(|(number, volume, _)| (number, volume.0)).collect();
            let volumes = view.volumes();
            (numbers, volumes.get(&VolumeId(0)).copied(), volumes.get(&VolumeId(1)).copied())
        };
        assert_eq!(seen(0), (vec![(1, 1), (7, 0)], Some(false), Some(true)));
        assert_eq!(seen(1), (vec![(0, 0)], Some(true), None));
    }

    #[test]
    fn a_target_with_an_acl_restricts_its_volumes() {
        let open = configured(&format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}")).unwrap();
        assert!(!open.targets()[0].is_restricted && open.targets()[0].volumes[0].1 == PublicAccess::Write);
        let text = format!("port_id = '{ID}'\nluns = {{ 0 = 'a' }}\n[[acl]]\ninitiator_port = '{ID}'");
        let closed = configured(&text).unwrap();
        assert!(
            closed.targets()[0].is_restricted && closed.targets()[0].volumes[0].1 == PublicAccess::Nothing
        );
    }

    const ID: &str = "0x0123456789abcdef0123456789abcdef";
}
