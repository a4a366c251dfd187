//! `blockmux rdma`: lists the fabrics of protocols over RDMA and the RDMA devices of this machine,
//! and says what keeps each from being used.

use crate::failure::Failure;
use crate::output::printable;
use crate::process::stdout::{print, print_json};
use crate::protocol::fabric::{FABRICS, FabricState};
use blockmux_verbs::device::{DeviceAttributes, MemoryWindows};
use blockmux_verbs::kernel::KernelPort;
use blockmux_verbs::survey::{DeviceDetails, Obstacle, Survey, SurveyedDevice};
use serde_json::{Value, json};
use std::io;

/// Arguments of `blockmux rdma`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RdmaArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists fabrics and devices.
pub(crate) fn run(args: &RdmaArgs) -> Result<(), Failure> {
    let survey = Survey::of_this_machine().map_err(|error| {
        Failure::run(format!("cannot list RDMA devices: {error}; check /sys/class/infiniband"))
    })?;
    let states: io::Result<_> = FABRICS.iter().map(|fabric| (fabric.state)(&survey)).collect();
    let found = Found { states: states.map_err(Failure::run)?, survey };
    if args.json { print_json(&as_json(&found)) } else { print(as_text(&found)) }
}

/// What there is on this machine.
struct Found {
    survey: Survey,
    /// The state of each fabric of [`FABRICS`].
    states: Vec<FabricState>,
}

impl Found {
    /// All obstacles, each once: the first of a device may be the reason of its fabric.
    fn obstacles(&self) -> Vec<String> {
        let of_fabrics = self.states.iter().filter_map(|state| state.reason.clone());
        let mut all = Vec::new();
        for obstacle in of_fabrics.chain(self.survey.all_obstacles().map(ToString::to_string)) {
            if !all.contains(&obstacle) {
                all.push(obstacle);
            }
        }
        all
    }
}

fn as_text(found: &Found) -> String {
    let survey = &found.survey;
    let mut lines = vec!["Fabrics".to_owned()];
    for (fabric, state) in FABRICS.iter().zip(&found.states) {
        let text = format!("{}: {}", state.name, fabric.about);
        lines.extend(wrapped(&format!("  {:<10} ", fabric.name), &text));
    }
    lines.push("Devices".to_owned());
    if survey.devices.is_empty() {
        lines.push("  none".to_owned());
    }
    for device in &survey.devices {
        lines.extend(device_lines(device));
    }
    let all = found.obstacles();
    if !all.is_empty() {
        lines.push("Obstacles".to_owned());
        lines.extend(all.iter().flat_map(|obstacle| wrapped("  - ", obstacle)));
    }
    lines.join("\n")
}

fn device_lines(device: &SurveyedDevice) -> Vec<String> {
    let SurveyedDevice { kernel, details, .. } = device;
    let firmware = match kernel.firmware.as_str() {
        "" => String::new(),
        firmware => format!(", firmware {firmware}"),
    };
    let mut lines = wrapped(&format!("  {:<10} ", kernel.name), &format!("{}{firmware}", kernel.kind()));
    let row = |key: &str, value: &str| wrapped(&format!("    {key:<8} "), value);
    for port in &kernel.ports {
        lines.extend(row(&format!("port {}", port.number), &port_text(port, details.as_ref())));
        let addresses = port.addresses.iter().map(|(address, interface)| format!("{address} ({interface})"));
        let addresses: Vec<_> = addresses.collect();
        if !addresses.is_empty() {
            lines.extend(row("RoCE v2", &addresses.join(", ")));
        }
    }
    if let Some(DeviceDetails { attributes, .. }) = details {
        lines.extend(row("queues", &queues_text(attributes)));
        lines.extend(row("memory", &memory_text(attributes, device.confines())));
    }
    lines
}

fn port_text(port: &KernelPort, details: Option<&DeviceDetails>) -> String {
    let mut parts = vec![port.state.to_lowercase(), port.link_layer.clone(), port.rate.clone()];
    parts.extend(mtu(port, details).map(|mtu| format!("MTU {mtu}")));
    parts.retain(|part| !part.is_empty());
    parts.join(", ")
}

fn mtu(port: &KernelPort, details: Option<&DeviceDetails>) -> Option<u32> {
    let ports = details.map(|details| &details.ports)?;
    ports.get(usize::from(port.number).checked_sub(1)?).map(|port| port.mtu)
}

fn queues_text(attributes: &DeviceAttributes) -> String {
    let DeviceAttributes { queue_pairs, queue_depth, reads, .. } = attributes;
    format!("{queue_pairs} queue pairs of {queue_depth} requests, {reads} RDMA Reads at a time")
}

fn memory_text(attributes: &DeviceAttributes, confines: bool) -> String {
    let windows = match windows(attributes.windows) {
        Some(windows) if !confines => format!("opened to peers by windows of type {windows}"),
        _ => "peers reach copies of data".to_owned(),
    };
    format!("{} registrations, {windows}", attributes.registrations)
}

fn windows(windows: MemoryWindows) -> Option<&'static str> {
    match windows {
        MemoryWindows::None => None,
        MemoryWindows::Type2A => Some("2A"),
        MemoryWindows::Type2B => Some("2B"),
    }
}

/// Breaks a text into lines of at most [`COLUMNS`] columns. The first begins with `start`, the
/// others with as many spaces.
fn wrapped(start: &str, text: &str) -> Vec<String> {
    let text = printable(text);
    let indent = " ".repeat(start.chars().count());
    let (mut lines, mut line) = (Vec::new(), start.to_owned());
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines.push(std::mem::replace(&mut line, indent.clone()));
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines.push(line);
    lines
}

fn as_json(found: &Found) -> Value {
    let survey = &found.survey;
    let fabrics = FABRICS.iter().zip(&found.states).map(|(fabric, state)| {
        json!({
            "name": fabric.name,
            "available": state.name == FabricState::WORKS.name,
            "state": state.name,
            "reason": state.reason,
            "about": fabric.about,
        })
    });
    let devices = survey.devices.iter().map(|device| device_json(device, &survey.obstacles));
    json!({
        "fabrics": fabrics.collect::<Value>(),
        "rdma_core": survey.has_library,
        "devices": devices.collect::<Value>(),
        "obstacles": found.obstacles(),
    })
}

fn device_json(device: &SurveyedDevice, of_all: &[Obstacle]) -> Value {
    let SurveyedDevice { kernel, details, obstacles } = device;
    let ports = kernel.ports.iter().map(|port| {
        let addresses = port.addresses.iter();
        let addresses = addresses
            .map(|(address, interface)| json!({ "address": address.to_string(), "interface": interface }));
        json!({
            "number": port.number,
            "state": port.state,
            "link_layer": port.link_layer,
            "rate": port.rate,
            "mtu": mtu(port, details.as_ref()),
            "addresses": addresses.collect::<Value>(),
        })
    });
    let attributes = details.as_ref().map(|details| {
        let attributes = &details.attributes;
        json!({
            "queue_pairs": attributes.queue_pairs,
            "queue_depth": attributes.queue_depth,
            "segments": attributes.segments,
            "reads": attributes.reads,
            "peer_reads": attributes.peer_reads,
            "registrations": attributes.registrations,
            "registration_len": attributes.registration_len,
            "shared_receive_queues": attributes.shared_receive_queues,
            "memory_windows": windows(attributes.windows),
        })
    });
    json!({
        "name": kernel.name,
        "kind": kernel.kind(),
        "firmware": kernel.firmware,
        "ports": ports.collect::<Value>(),
        "attributes": attributes,
        "ready": obstacles.is_empty() && of_all.is_empty(),
        "obstacles": texts(obstacles),
    })
}

fn texts(obstacles: &[Obstacle]) -> Value {
    obstacles.iter().map(ToString::to_string).collect()
}

/// Width of the text.
const COLUMNS: usize = 80;

const EXAMPLES: &str = "\
A fabric is how a protocol over RDMA connects; `rdma=NAME` in a URL chooses it.
Software fabrics need no device.

Examples:
  blockmux rdma
  blockmux rdma --json";

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::srp::url::SrpUrl;
    use blockmux_verbs::device::PortAttributes;
    use blockmux_verbs::kernel::{KernelDevice, Transport};

    fn port() -> KernelPort {
        KernelPort {
            number: 1,
            state: "ACTIVE".to_owned(),
            link_layer: "Ethernet".to_owned(),
            rate: "100 Gb/sec (4X EDR)".to_owned(),
            addresses: vec![
                ("192.0.2.1".parse().unwrap(), "eth0".to_owned()),
                ("fe80::5054:ff:fe12:3456".parse().unwrap(), "eth0".to_owned()),
                ("2001:db8::5054:ff:fe12:3456".parse().unwrap(), "eth0".to_owned()),
            ],
        }
    }

    fn details() -> DeviceDetails {
        let attributes = DeviceAttributes {
            firmware: "16.35.2000".to_owned(),
            ports: 1,
            queue_pairs: 131_072,
            queue_depth: 32_768,
            segments: 30,
            peer_reads: 16,
            reads: 16,
            registrations: 16_777_216,
            registration_len: u64::MAX,
            shared_receive_queues: 8_388_608,
            windows: MemoryWindows::Type2B,
            has_kernel_flags: false,
        };
        let port = PortAttributes { is_active: true, mtu: 4096, message_len: 1 << 30 };
        DeviceDetails { attributes, ports: vec![port] }
    }

    fn adapter() -> SurveyedDevice {
        let kernel = KernelDevice {
            name: "mlx5_0".to_owned(),
            transport: Transport::InfiniBand,
            firmware: "16.35.2000".to_owned(),
            node: Some("/dev/infiniband/uverbs0".into()),
            ports: vec![port()],
        };
        SurveyedDevice { kernel, details: Some(details()), obstacles: Vec::new() }
    }

    fn survey(devices: Vec<SurveyedDevice>, obstacles: Vec<Obstacle>) -> Found {
        found(Survey { devices, obstacles, has_library: true })
    }

    /// Fabrics in software work.
    fn found(survey: Survey) -> Found {
        let of_devices = (FABRICS[2].state)(&survey).unwrap();
        Found { survey, states: vec![FabricState::WORKS, FabricState::WORKS, of_devices] }
    }

    /// The text from the devices on.
    fn devices_text(found: &Found) -> String {
        let text = as_text(found);
        text[text.find("Devices").unwrap()..].to_owned()
    }

    #[test]
    fn a_device_is_a_few_lines_of_80_columns() {
        let text = devices_text(&survey(vec![adapter()], Vec::new()));
        let expected = "\
Devices
  mlx5_0     RoCE, firmware 16.35.2000
    port 1   active, Ethernet, 100 Gb/sec (4X EDR), MTU 4096
    RoCE v2  192.0.2.1 (eth0), fe80::5054:ff:fe12:3456 (eth0),
             2001:db8::5054:ff:fe12:3456 (eth0)
    queues   131072 queue pairs of 32768 requests, 16 RDMA Reads at a time
    memory   16777216 registrations, opened to peers by windows of type 2B";
        assert_eq!(text, expected);
    }

    #[test]
    fn obstacles_follow_the_devices_those_of_all_devices_first() {
        let mut device = adapter();
        device.details = None;
        device.kernel.ports[0].state = "DOWN".to_owned();
        device.kernel.ports[0].addresses.clear();
        device.obstacles = vec![Obstacle::NoActivePort { device: "mlx5_0".to_owned() }];
        let text = devices_text(&survey(vec![device], vec![Obstacle::LockedMemory(8_388_608)]));
        let expected = "\
Devices
  mlx5_0     RoCE, firmware 16.35.2000
    port 1   down, Ethernet, 100 Gb/sec (4X EDR)
Obstacles
  - at most 8388608 bytes of memory can be registered; raise LimitMEMLOCK= of
    the service, or `ulimit -l`
  - mlx5_0 has no active port; check its cable, its interface (`ip link`), and
    on InfiniBand the subnet manager";
        assert_eq!(text, expected);
    }

    #[test]
    fn json_has_the_devices_and_whether_they_are_ready() {
        let found = as_json(&survey(vec![adapter()], Vec::new()));
        let device = &found["devices"][0];
        assert_eq!(
            (&device["name"], &device["kind"], &device["ready"]),
            (&json!("mlx5_0"), &json!("RoCE"), &json!(true))
        );
        assert_eq!(device["ports"][0]["mtu"], 4096);
        assert_eq!(
            device["ports"][0]["addresses"][0],
            json!({ "address": "192.0.2.1", "interface": "eth0" })
        );
        assert_eq!(device["attributes"]["memory_windows"], "2B");
        let found = as_json(&survey(vec![adapter()], vec![Obstacle::LockedMemory(1)]));
        assert_eq!(
            (&found["devices"][0]["ready"], &found["obstacles"].as_array().unwrap().len()),
            (&json!(false), &1)
        );
    }

    #[test]
    fn a_word_that_is_wider_than_a_line_has_a_line_of_its_own() {
        let wide = "x".repeat(90);
        assert_eq!(
            wrapped("- ", &format!("a {wide} b")),
            ["- a".to_owned(), format!("  {wide}"), "  b".to_owned()]
        );
        assert_eq!(wrapped("- ", &wide), [format!("- {wide}")]);
    }

    #[test]
    fn every_listed_fabric_can_be_named_in_urls() {
        for fabric in FABRICS {
            let url = format!("srp://host?rdma={}", fabric.name);
            assert!(url.parse::<SrpUrl>().is_ok(), "{url}");
        }
        assert_eq!(FABRICS.len(), 3);
    }

    /// Name, whether it is available, and the reason of a state.
    fn states(found: &Found) -> Vec<(String, bool, Option<String>)> {
        let json = as_json(found);
        let state = |fabric: &Value| {
            let reason = fabric["reason"].as_str().map(str::to_owned);
            (fabric["state"].as_str().unwrap().to_owned(), fabric["available"].as_bool().unwrap(), reason)
        };
        json["fabrics"].as_array().unwrap().iter().map(state).collect()
    }

    #[test]
    fn a_fabric_says_whether_it_works_and_why_not() {
        let works = ("works".to_owned(), true, None);
        let ready = survey(vec![adapter()], Vec::new());
        assert_eq!(states(&ready), [works.clone(), works.clone(), works.clone()]);
        let reason = "Linux's rdma_rxe has UDP port 4791 of all addresses; unload it".to_owned();
        let mut taken = ready;
        taken.states[1] = FabricState { name: "port in use", reason: Some(reason.clone()) };
        let [iwarp, (state, is_available, why), verbs] = &states(&taken)[..] else { panic!() };
        assert_eq!([iwarp, verbs], [&works; 2]);
        assert_eq!((state.as_str(), is_available, why), ("port in use", &false, &Some(reason.clone())));
        assert!(as_text(&taken).contains("\n  roce       port in use: RoCEv2 in software"));
        assert!(
            as_text(&taken).contains("\nObstacles\n  - Linux's rdma_rxe has UDP port 4791 of all addresses;")
        );
        assert_eq!(as_json(&taken)["obstacles"], json!([reason]));
        taken.states[1].name = FabricState::WORKS.name;
        let (state, is_available, reason) = &states(&taken)[1];
        assert_eq!((state.as_str(), is_available, reason.is_some()), ("works", &true, true));
    }

    #[test]
    fn devices_that_cannot_be_used_are_a_state_with_the_first_obstacle() {
        let missing = || vec![Obstacle::NoDevice { software: None }];
        let mut down = adapter();
        down.obstacles = vec![Obstacle::NoActivePort { device: "mlx5_0".to_owned() }];
        let (devices, obstacles) = (vec![adapter()], vec![Obstacle::LockedMemory(1)]);
        let without_library = found(Survey { devices, obstacles, has_library: false });
        for (found, expected, start) in [
            (survey(Vec::new(), missing()), "no device", "the kernel has no RDMA device; "),
            (survey(vec![down], Vec::new()), "device not ready", "mlx5_0 has no active port; "),
            (without_library, "missing library", "at most 1 bytes"),
        ] {
            let (state, is_available, reason) = &states(&found)[2];
            assert_eq!((state.as_str(), is_available), (expected, &false));
            assert!(reason.as_ref().unwrap().starts_with(start), "{reason:?}");
            assert!(as_text(&found).contains(&format!("\n  verbs      {expected}: RDMA devices")));
        }
    }
}
