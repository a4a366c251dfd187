//! `allow` in the config file: the networks from which clients may connect.

use blockmux_proto::names::networks::{AllowedNetworks, Network, NetworkError};
use serde::{Deserialize, Deserializer, de};
use std::net::IpAddr;
use std::str::FromStr;
use toml::Value;

/// Reads a list of networks.
pub(crate) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AllowedNetworks, D::Error> {
    let written = Vec::<WrittenNetwork>::deserialize(deserializer)?;
    let networks: Vec<Network> = written.into_iter().map(|WrittenNetwork(network)| network).collect();
    Ok(AllowedNetworks::only(&networks))
}

/// Parses a list of networks; `None` allows all clients.
///
/// # Errors
/// Names the invalid network and says what to write.
pub(crate) fn parse(written: Option<&[String]>) -> Result<AllowedNetworks, String> {
    let Some(written) = written else { return Ok(AllowedNetworks::default()) };
    let networks: Result<Vec<Network>, NetworkError> = written.iter().map(|text| text.parse()).collect();
    networks.map(|networks| AllowedNetworks::only(&networks)).map_err(|error| format!("allow: {error}"))
}

/// The value of the key `allow`; `None` if all clients are allowed.
pub(crate) fn value(networks: &AllowedNetworks) -> Option<Value> {
    let texts = networks.networks().map(|network| Value::from(network.to_string()));
    (!networks.is_everyone()).then(|| Value::Array(texts.collect()))
}

/// Whether the value of an `allow`, or its absence, admits a client.
pub(crate) fn admits(value: Option<&Value>, client: Option<IpAddr>) -> bool {
    let Some(list) = value.and_then(Value::as_array) else { return true };
    let networks = list.iter().filter_map(|text| Network::from_str(text.as_str()?).ok());
    AllowedNetworks::only(&networks.collect::<Vec<_>>()).admits(client)
}

/// A network in a config file. Its parse error has the line and column of its text.
struct WrittenNetwork(Network);

impl<'de> Deserialize<'de> for WrittenNetwork {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WrittenNetwork, D::Error> {
        String::deserialize(deserializer)?.parse().map(WrittenNetwork).map_err(de::Error::custom)
    }
}
