//! SRP URLs: connecting to a logical unit, describing it, resets, and listing a port's units.

use crate::failure::Failure;
use crate::protocol::ResetFunction;
use crate::protocol::fabric::{target_advice, with_fabric};
use crate::protocol::reach;
use crate::protocol::units::{unit_json, unit_rows};
use crate::protocol::{Description, DiscoveredExport, Discovery, Remote};
use blockmux_engine::fabric::StreamFabric;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::srp::initiator::{self, SrpConnectError, SrpEndpoint};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::scsi::Lun;
use blockmux_proto::srp::client::{
    LoginRejectReason, ResponseCode, SrpRefused, TaskManagementFunction, UnitRefused,
};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_proto::srp::url::SrpUrl;
use blockmux_volume::Volume;
use data_encoding::HEXLOWER;
use std::sync::Arc;

/// Parses a URL.
pub(super) fn of_url(text: &str) -> Result<Box<dyn Remote>, Failure> {
    let url: SrpUrl = reach::read(text)?;
    let initiator = url.initiator.unwrap_or_else(own_guid);
    let rdma = url.rdma.unwrap_or_default();
    Ok(with_fabric!(rdma, over => Box::new(SrpRemote { url, over, initiator })))
}

struct SrpRemote<F> {
    url: SrpUrl,
    /// The fabric of the connections.
    over: F,
    /// The GUID of this machine's initiator ports.
    initiator: [u8; 8],
}

impl<F: StreamFabric> Remote for SrpRemote<F> {
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure> {
        let target = self.target()?;
        let channels = self.url.connections.unwrap_or(connections);
        let further = reach::further(&self.url, &self.url.portals, [])?;
        let volume = self.ask(|address| {
            let endpoint = self.endpoint(address, target, self.url.lun);
            initiator::connect(SrpEndpoint {
                channels,
                further: reach::beside(address, &further),
                ..endpoint
            })
        })?;
        Ok(Arc::new(volume))
    }

    /// A target port's identifier is globally unique; addresses are paths to it.
    fn volume_key(&self) -> String {
        let target = self.url.target.map_or_else(String::new, |target| target.to_string());
        format!("srp {target} {}", self.url.lun)
    }

    fn describe(&self) -> Result<Description, Failure> {
        let target = self.target()?;
        let further = reach::further(&self.url, &self.url.portals, [])?;
        let unit = self.ask(|address| {
            let endpoint = self.endpoint(address, target, self.url.lun);
            initiator::describe(&SrpEndpoint { further: reach::beside(address, &further), ..endpoint })
        })?;
        let (name, lun) = (target.to_string(), self.url.lun);
        let json = unit_json((self.url.to_string(), "srp"), Some(&name), lun, &unit);
        let info = unit.volume_info();
        Ok(Description { rows: unit_rows(name, lun, &unit), json, info })
    }

    /// The logical units of the target port that the URL names.
    fn discover(&self) -> Result<Discovery, Failure> {
        let target = self.target()?;
        self.ask(|address| self.list(address, target))
    }

    fn reset(&self, function: ResetFunction) -> Result<&'static str, Failure> {
        let (target, url) = (self.target()?, &self.url);
        let (function, done) = match function {
            ResetFunction::Lun => (TaskManagementFunction::LOGICAL_UNIT_RESET, "the logical unit is reset"),
            ResetFunction::AbortTaskSet => {
                (TaskManagementFunction::ABORT_TASK_SET, "the commands of this session are aborted")
            }
            ResetFunction::ClearTaskSet => {
                (TaskManagementFunction::CLEAR_TASK_SET, "the commands of all sessions are aborted")
            }
            ResetFunction::Target | ResetFunction::Cold => {
                let advice = "SRP can only reset a logical unit; use the function lun";
                return Err(Failure::request(format!("{url}: {advice}")));
            }
        };
        let response =
            self.ask(|address| initiator::manage(&self.endpoint(address, target, url.lun), function))?;
        let why = match response {
            ResponseCode::NO_FAILURE => return Ok(done),
            ResponseCode::FUNCTION_NOT_SUPPORTED => "it does not support the function",
            ResponseCode::REQUEST_FIELDS_INVALID => "it has no such logical unit",
            _ => "the function failed",
        };
        Err(Failure::run(format!("{url}: the target did not reset: {why} ({function}: {response})")))
    }
}

impl<F: StreamFabric> SrpRemote<F> {
    fn target(&self) -> Result<SrpPortId, Failure> {
        self.url.target.ok_or_else(|| {
            let url = self.url.to_string();
            let (place, query) = url.split_at(url.find('?').unwrap_or(url.len()));
            let advice = format!("write {place}/TARGET-PORT-ID/lun{query}, as the target prints it");
            let why = "names no target port, and SRP over RDMA/CM has no discovery";
            Failure::request(format!("{url}: {why}; {advice}"))
        })
    }

    fn endpoint(&self, address: &Address, target: SrpPortId, lun: u16) -> SrpEndpoint<F> {
        SrpEndpoint {
            address: address.clone(),
            further: Vec::new(),
            initiator: self.initiator,
            target,
            lun: Lun::new(lun),
            channels: 1,
            immediate_data: self.url.immediate_data,
            over: self.over.clone(),
            reconnect_timeout: self.url.reconnect,
            timeout: reach::timeout(self.url.timeout),
        }
    }

    /// Calls `ask` with one address of the host after another, until one can be reached.
    fn ask<T>(&self, ask: impl FnMut(&Address) -> Result<T, SrpConnectError>) -> Result<T, Failure> {
        let addresses = reach::addresses(&self.url, &self.url.portals.first)?;
        reach::ask_each(&self.url, &addresses, ask)?.map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &SrpConnectError) -> Failure {
        let url = &self.url;
        let advice = match error {
            SrpConnectError::Broken { .. }
            | SrpConnectError::Silent { .. }
            // The answer of a port that serves another protocol.
            | SrpConnectError::Refused {
                refused: SrpRefused::Login(LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL),
                ..
            } => {
                match target_advice("SRP", url.rdma, error) {
                    Some(advice) => advice,
                    None => return Failure::request(format!("{url}: {error}")),
                }
            }
            SrpConnectError::Refused { refused, .. } => match refused {
                SrpRefused::Login(LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL) => {
                    let guid = HEXLOWER.encode(&self.initiator);
                    format!(
                        "check the identifier; add GUID 0x{guid} to the target's access list, or give ?initiator=GUID"
                    )
                }
                SrpRefused::Unit(UnitRefused::DifferentUnit { .. }) => {
                    "give only addresses of one target".to_owned()
                }
                SrpRefused::Unit(_) => {
                    let target = SrpUrl { lun: 0, ..url.clone() };
                    format!("`blockmux discover '{target}'` lists its logical units")
                }
                SrpRefused::Login(_) => "ask the target's administrator".to_owned(),
            },
        };
        Failure::request(format!("{url}: {error}; {advice}"))
    }

    /// Lists the logical units of the target port that are disks.
    fn list(&self, address: &Address, target: SrpPortId) -> Result<Discovery, SrpConnectError> {
        let mut exports = Vec::new();
        for lun in initiator::luns(&self.endpoint(address, target, 0))? {
            let Some(number) = lun.number() else { continue };
            match initiator::describe(&self.endpoint(address, target, number)) {
                Ok(unit) => exports.push(DiscoveredExport {
                    name: format!("{target}/{number}"),
                    url: SrpUrl { lun: number, ..self.url.clone() }.to_string(),
                    description: format!("{} {}", unit.vendor, unit.product).trim().to_owned(),
                    size: Some(unit.size()),
                }),
                // The unit is not a disk.
                Err(SrpConnectError::Refused { refused: SrpRefused::Unit(refused), .. }) => {
                    tracing::debug!("target port {target}: {refused}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Discovery { url: self.url.to_string(), exports, left_out: 0 })
    }
}

/// The GUID of this machine's initiator ports. It is the same in all processes.
fn own_guid() -> [u8; 8] {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().to_lowercase();
    let [.., a, b, c, d, e, f, g, h] = VolumeUuid::of_texts(&["srp initiator port", &host]).to_bytes();
    [a, b, c, d, e, f, g, h]
}
