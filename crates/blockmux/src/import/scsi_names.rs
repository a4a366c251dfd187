//! Names of SRP ports that foreign targets use.

/// The identifier of an SRP target port of Linux's `ib_srpt`, which has its GUID twice, from the
/// port's GID or GUID; `None` for another name.
pub(super) fn srp_port(name: &str) -> Option<String> {
    let digits = hexadecimal(name)?;
    let guid = match digits.len() {
        32 => &digits[16..],
        16 => &digits,
        _ => return None,
    };
    Some(format!("0x{guid}{guid}"))
}

/// An SRP initiator as our ACLs name it: a port's whole identifier if the name has one, or the GUID
/// of a GID; `None` for another name.
pub(super) fn srp_initiator(name: &str) -> Option<String> {
    let digits = hexadecimal(name)?;
    match digits.len() {
        // The prefix of link-local addresses: it is a GID, whose second half is the GUID.
        32 if digits.starts_with("fe80000000000000") => Some(format!("0x{}", &digits[16..])),
        32 | 16 => Some(format!("0x{digits}")),
        _ => None,
    }
}

/// The hexadecimal digits of `ib.fe80...`, `0x...` or `fe80:0000:...`.
fn hexadecimal(name: &str) -> Option<String> {
    let name = name.trim();
    let name = name.strip_prefix("ib.").unwrap_or(name);
    let name = name.strip_prefix("0x").unwrap_or(name);
    let digits: String = name.chars().filter(|c| *c != ':').collect();
    digits.chars().all(|c| c.is_ascii_hexdigit()).then(|| digits.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_srp_port_has_its_guid_twice() {
        let port = "0x0002c90300a1b2c30002c90300a1b2c3";
        assert_eq!(srp_port("ib.fe800000000000000002c90300a1b2c3").as_deref(), Some(port));
        assert_eq!(srp_port("fe80:0000:0000:0000:0002:c903:00a1:b2c3").as_deref(), Some(port));
        assert_eq!(srp_port("ib_srpt_target_0"), None);
        assert_eq!(srp_initiator("0x00000000000000000002c90300a1b2c3").unwrap().len(), 34);
        assert_eq!(
            srp_initiator("ib.fe800000000000000002c90300a1b2c3").as_deref(),
            Some("0x0002c90300a1b2c3")
        );
        assert_eq!(srp_initiator("*"), None);
    }
}
