//! Logical units with several paths, for iSCSI and SRP. A unit is recognised by its designator and
//! serial number.

use crate::carrier::blocking::BlockingConnectError;
use crate::net::socket::Address;
use crate::remote::check_unchanged;
use blockmux_proto::scsi::initiator::{UnitInfo, UnitRefused};
use std::fmt::Display;
use std::time::Duration;
use tracing::warn;

/// Queries the unit over each path. Returns the unit of the first path that answers, and the result
/// of each path; `None` for a path that cannot be used now and may come up later.
///
/// # Errors
/// If no path can be used, a path refuses for good, or one leads to a different unit.
pub(super) fn first_unit<T, R: From<UnitRefused> + Display>(
    (first, further): (&Address, &[Address]),
    is_retryable: fn(&R) -> bool,
    mut query: impl FnMut(&Address) -> Result<(UnitInfo, T), BlockingConnectError<R>>,
) -> Result<(UnitInfo, Vec<Option<T>>), BlockingConnectError<R>> {
    let mut known: Option<(UnitInfo, &Address)> = None;
    let (mut results, mut lost) = (Vec::new(), None);
    for address in std::iter::once(first).chain(further) {
        match query(address) {
            Ok((unit, result)) => {
                if let Some((first, at)) = &known {
                    check_same(first, &unit, at)
                        .map_err(|refused| BlockingConnectError::refused(address, refused.into()))?;
                }
                known = known.or(Some((unit, address)));
                results.push(Some(result));
            }
            Err(error) if !further.is_empty() && error.is_retryable(is_retryable) => {
                warn!("a path cannot be used: {error}");
                lost = lost.or(Some(error));
                results.push(None);
            }
            Err(error) => return Err(error),
        }
    }
    let silent = || BlockingConnectError::silent(first);
    let (unit, _) = known.ok_or_else(|| lost.unwrap_or_else(silent))?;
    Ok((unit, results))
}

/// Checks that the unit of a new session is `first`; it may have been resized.
pub(super) fn check_unit(first: &UnitInfo, now: Option<&UnitInfo>, connections: u32) -> Result<(), String> {
    let now = now.ok_or("the target has not described the unit")?;
    if now.designator != first.designator || now.serial != first.serial {
        return Err("its LUN leads to another logical unit now".to_owned());
    }
    let (first, mut info) = (first.volume_info(), now.volume_info());
    if has_name(now) {
        // It is the same unit, and may have been resized.
        info.size = first.size;
    }
    check_unchanged(&first, &info, connections)
}

/// Checks that the unit at the end of a path is `first`, which was seen at the address `at`.
fn check_same(first: &UnitInfo, unit: &UnitInfo, at: &Address) -> Result<(), UnitRefused> {
    if has_name(unit) && (&first.designator, &first.serial) == (&unit.designator, &unit.serial) {
        return Ok(());
    }
    let name = |unit: &UnitInfo| match (unit.designator.as_str(), unit.serial.as_str()) {
        ("", "") => "a unit without any name".to_owned(),
        ("", serial) => format!("{} {} with serial number {serial}", unit.vendor, unit.product),
        (designator, _) => designator.to_owned(),
    };
    Err(UnitRefused::DifferentUnit { unit: name(unit), first: name(first), at: at.to_string() })
}

fn has_name(unit: &UnitInfo) -> bool {
    !unit.designator.is_empty() || !unit.serial.is_empty()
}

/// Timeout of a login that describes a unit.
pub(super) const LOG_IN_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of task management: a reset waits for commands that cannot be aborted.
pub(super) const MANAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pool of a login session, in bytes.
pub(super) const LOG_IN_POOL: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(designator: &str, serial: &str) -> UnitInfo {
        let (vendor, product) = ("MAKER".to_owned(), "DISK".to_owned());
        UnitInfo {
            vendor,
            product,
            designator: designator.into(),
            serial: serial.into(),
            ..UnitInfo::default()
        }
    }

    #[test]
    fn a_unit_is_recognised_by_its_name_and_an_unnamed_unit_never_is() {
        let at = Address::Tcp(([192, 0, 2, 1], 3260).into());
        let check = |first, there| check_same(&first, &there, &at).map_err(|refused| refused.to_string());
        assert_eq!(check(unit("naa.1", "a"), unit("naa.1", "a")), Ok(()));
        assert_eq!(check(unit("", "a"), unit("", "a")), Ok(()));
        assert_eq!(
            check(unit("naa.1", "a"), unit("naa.2", "a")).unwrap_err(),
            "leads to naa.2, not to naa.1 as 192.0.2.1:3260 does"
        );
        assert_eq!(
            check(unit("", "a"), unit("", "b")).unwrap_err(),
            "leads to MAKER DISK with serial number b, not to MAKER DISK with serial number a as 192.0.2.1:3260 does"
        );
        assert!(
            check(unit("", ""), unit("", "")).unwrap_err().starts_with("leads to a unit without any name")
        );
    }
}
