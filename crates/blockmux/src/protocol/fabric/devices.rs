//! RDMA devices, by rdma-core.

use super::{FabricPort, FabricPorts, FabricState, RdmaFabric, check_of_target};
use blockmux_engine::fabric::FabricListener;
use blockmux_engine::fabric::verbs::VerbsListener;
use blockmux_proto::names::rdma::DEVICE_TARGET_QUERY;
use blockmux_verbs::survey::Survey;

pub(super) static DEVICES: RdmaFabric = RdmaFabric {
    name: "verbs",
    title: "RDMA devices",
    target_check: check_of_target,
    about: "RDMA devices, by rdma-core; they are listed below",
    query: DEVICE_TARGET_QUERY,
    ports: Some(FabricPorts {
        bind: |address| VerbsListener::bind(address).map(FabricPort::Verbs),
        explain: |address, error| format!("cannot listen on {address} for RDMA devices: {error}"),
        unserved: "RDMA devices are not served",
        loopback: None,
    }),
    state: |survey| Ok(state_of(survey)),
};

fn state_of(survey: &Survey) -> FabricState {
    if survey.has_ready_device() {
        return FabricState::WORKS;
    }
    let name = match survey {
        survey if survey.devices.is_empty() => "no device",
        survey if !survey.has_library => "missing library",
        _ => "device not ready",
    };
    FabricState { name, reason: survey.all_obstacles().next().map(ToString::to_string) }
}
