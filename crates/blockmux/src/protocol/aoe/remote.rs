//! AoE URLs: connecting to a disk, describing it, and discovering the disks of a network.

use super::{AOE, cannot_open};
use crate::failure::Failure;
use crate::output::both_sizes;
use crate::protocol::reach;
use crate::protocol::{Description, DiscoveredExport, Discovery, Remote};
use blockmux_engine::protocol::aoe::{self, AoeConnectError, AoeEndpoint};
use blockmux_proto::aoe::discovery;
use blockmux_proto::aoe::url::AoeUrl;
use blockmux_volume::Volume;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// Parses a URL.
pub(super) fn of_url(text: &str) -> Result<Box<dyn Remote>, Failure> {
    Ok(Box::new(AoeRemote { text: text.to_owned(), url: reach::read(text)? }))
}

struct AoeRemote {
    /// The URL as given.
    text: String,
    url: AoeUrl,
}

impl AoeRemote {
    fn endpoint(&self) -> Result<AoeEndpoint, Failure> {
        let AoeRemote { text, url } = self;
        let address = url.address.ok_or_else(|| {
            Failure::request(format!("{text}: names no disk; `blockmux discover '{text}'` lists the disks"))
        })?;
        Ok(AoeEndpoint { interfaces: url.interfaces.clone(), address, timeout: url.reconnect })
    }

    fn failed(&self, error: &AoeConnectError) -> Failure {
        match error {
            AoeConnectError::Port(port) => cannot_open(port),
            AoeConnectError::Crowded { .. } => Failure::request(format!("{}: {error}", self.text)),
            AoeConnectError::Silent { .. } => {
                let all = format!("aoe://{}", self.url.interfaces.join(","));
                Failure::request(format!(
                    "{}: {error}; `blockmux discover {all}` lists the disks that do",
                    self.text
                ))
            }
        }
    }
}

impl Remote for AoeRemote {
    fn open(&self, _connections: u32) -> Result<Arc<dyn Volume>, Failure> {
        let volume = aoe::connect(self.endpoint()?).map_err(|error| self.failed(&error))?;
        Ok(Arc::new(volume))
    }

    fn volume_key(&self) -> String {
        let disk = self.url.address.map(|disk| disk.to_string()).unwrap_or_default();
        format!("aoe {} {disk}", self.url.interfaces.join(","))
    }

    fn describe(&self) -> Result<Description, Failure> {
        let endpoint = self.endpoint()?;
        let described = aoe::describe(&endpoint).map_err(|error| self.failed(&error))?;
        let (disk, stations) = (&described.disk, &described.stations);
        let size = disk.volume_info().size;
        let shown = stations.iter().map(|(name, sectors)| format!("{name}, {sectors} sectors a frame"));
        let rows = vec![
            ("disk", endpoint.address.to_string()),
            ("size", both_sizes(size)),
            ("model", disk.model.clone()),
            ("serial", disk.serial.clone()),
            ("write cache", if disk.write_cache { "on" } else { "off" }.to_owned()),
            ("trim", if disk.trim_sectors > 0 { "yes" } else { "no" }.to_owned()),
            ("station", shown.collect::<Vec<_>>().join("; ")),
        ];
        let json = json!({
            "url": self.text,
            "protocol": AOE.name,
            "disk": endpoint.address.to_string(),
            "size": size,
            // ATA does not report it; the target refuses writes.
            "read_only": false,
            "model": disk.model,
            "serial": disk.serial,
            "write_cache": disk.write_cache,
            "trim": disk.trim_sectors > 0,
            "stations": stations.iter().map(|(name, sectors)| json!({ "station": name, "sectors": sectors })).collect::<Vec<_>>(),
        });
        Ok(Description { rows, json, info: disk.volume_info() })
    }

    fn discover(&self) -> Result<Discovery, Failure> {
        let interfaces = &self.url.interfaces;
        let (found, left_out) = aoe::discover(interfaces, DISCOVERY).map_err(|error| cannot_open(&error))?;
        let export = |found: discovery::FoundDisk| {
            let interface = interfaces.get(usize::from(found.station.port.0)).map_or("", String::as_str);
            let config = String::from_utf8_lossy(&found.config).into_owned();
            let model = found.disk.as_ref().map_or("", |disk| disk.model.as_str());
            let described = [format!("at {}", found.station.mac), model.to_owned(), config];
            DiscoveredExport {
                name: found.address.to_string(),
                url: format!("aoe://{interface}/{}", found.address),
                description: described
                    .into_iter()
                    .filter(|part| !part.is_empty())
                    .collect::<Vec<_>>()
                    .join(", "),
                size: found.disk.map(|disk| disk.volume_info().size),
            }
        };
        let exports = found.into_iter().map(export).collect();
        Ok(Discovery { url: format!("aoe://{}", interfaces.join(",")), exports, left_out })
    }
}

/// Time for answers to a broadcast.
const DISCOVERY: Duration = Duration::from_secs(1);
