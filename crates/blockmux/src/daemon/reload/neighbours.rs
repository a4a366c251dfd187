//! Finds volumes that would grow over data of another one. See
//! docs/decisions/0118-a-volume-does-not-grow-over-data-of-another.md.

use super::model::Model;
use super::plan::{VolumeStep, VolumeSteps};
use crate::daemon::opening::NamedVolume;
use crate::data::part::DataPart;
use crate::protocol::policy::Policy;
use std::collections::HashMap;

/// Marks the resizes that are refused, as far as the texts of the specs tell: to look at a path may
/// hang. Returns why the first of them is refused.
pub(super) fn mark(steps: &mut VolumeSteps, running: &Model, desired: &Model) -> Option<String> {
    let mut refusal = None;
    let configs = [(running, None), (desired, None)];
    let mut neighbours = None;
    for (name, step) in steps.iter_mut().filter(|(_, step)| **step == VolumeStep::Resize) {
        let neighbours = neighbours.get_or_insert_with(|| Neighbours::of(configs));
        if let Err(why) = neighbours.check(name, configs) {
            *step = VolumeStep::Overlap;
            refusal.get_or_insert(why);
        }
    }
    refusal
}

/// Checks that none of these volumes grows over data of another one, which the new config has or
/// the daemon still serves. Those that overlap before, by config, may continue to. Each config may
/// have the policy that knows what its volumes consist of.
///
/// # Errors
/// Names both volumes and says what to do.
pub(super) fn check<'a>(
    mut resized: impl Iterator<Item = &'a str>,
    configs: [KnownConfig<'a>; 2],
) -> Result<(), String> {
    let mut neighbours = None;
    resized
        .try_for_each(|name| neighbours.get_or_insert_with(|| Neighbours::of(configs)).check(name, configs))
}

/// A config, and the policy that knows what its volumes consist of.
type KnownConfig<'a> = (&'a Model, Option<&'a Policy>);

/// The parts of files, devices and volumes on other servers that a volume consists of, also by the
/// texts of its spec.
fn parts(own: &NamedVolume, policy: Option<&Policy>) -> Vec<DataPart> {
    let mut parts = DataPart::of_text(&own.entry.spec);
    parts.extend(policy.into_iter().flat_map(|policy| policy.data_of(&own.name)));
    parts
}

/// The data of all volumes, by the key of each file, device or volume on another server.
struct Neighbours<'a>(HashMap<String, Vec<(&'a NamedVolume, DataPart)>>);

impl<'a> Neighbours<'a> {
    fn of([(running, its_policy), (desired, policy)]: [KnownConfig<'a>; 2]) -> Neighbours<'a> {
        // With the settings that a volume gets, if it stays.
        let settings = |own: &'a NamedVolume| desired.volume(&own.name).unwrap_or(own);
        let before = running.volumes().iter().map(|own| (settings(own), parts(own, its_policy)));
        let after = desired.volumes().iter().map(|own| (own, parts(own, policy)));
        Neighbours::with_parts(before.chain(after))
    }

    fn with_parts(volumes: impl Iterator<Item = (&'a NamedVolume, Vec<DataPart>)>) -> Neighbours<'a> {
        let mut all: HashMap<String, Vec<_>> = HashMap::new();
        for (volume, parts) in volumes {
            for part in parts {
                all.entry(part.key.clone()).or_default().push((volume, part));
            }
        }
        Neighbours(all)
    }

    fn check(
        &self,
        name: &str,
        [(running, its_policy), (desired, policy)]: [KnownConfig<'_>; 2],
    ) -> Result<(), String> {
        let both = running.volume(name).zip(desired.volume(name));
        let Some((before, after)) = both else { return Ok(()) };
        self.check_growth(after, &parts(before, its_policy), &parts(after, policy))
    }

    /// Checks that a volume with the parts `before` can have the parts `after`.
    ///
    /// # Errors
    /// Names the volume whose data it would get.
    fn check_growth(&self, own: &NamedVolume, before: &[DataPart], after: &[DataPart]) -> Result<(), String> {
        let has = |parts: &[DataPart], other: &DataPart| parts.iter().any(|part| part.overlaps(other));
        let near = after.iter().flat_map(|part| self.0.get(&part.key).into_iter().flatten());
        let mut others = near.filter(|(other, part)| {
            let is_meant = own.entry.shared && other.entry.shared;
            other.name != own.name && !is_meant && has(after, part) && !has(before, part)
        });
        let Some((other, _)) = others.next() else { return Ok(()) };
        let (name, other) = (&own.name, &other.name);
        Err(format!(
            "volume `{name}`: would grow over data of `{other}`, which has a part of the same file or device; choose a \
             smaller size, or remove `{other}` first; for volumes that are meant to overlap, set shared = true in both"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::VolumeEntry;

    #[test]
    fn a_slice_grows_up_to_data_of_others_and_over_what_it_has_in_common_with_them_before() {
        let volume = |text: &str, shared| {
            let entry: VolumeEntry = text.parse().unwrap();
            let (name, entry) = (entry.name.clone().unwrap(), VolumeEntry { shared, ..entry });
            NamedVolume { name, entry }
        };
        let parts = |own: &NamedVolume| parts(own, None);
        let grows = |[before, after, other]: [&str; 3], is_shared: [bool; 2]| {
            let [own, other] =
                [(after, is_shared[0]), (other, is_shared[1])].map(|(own, is)| volume(own, is));
            let neighbours = Neighbours::with_parts([&own, &other].into_iter().map(|own| (own, parts(own))));
            neighbours.check_growth(&own, &parts(&volume(before, false)), &parts(&own)).is_ok()
        };
        let [first, second, third] = ["1m", "2m", "3m"].map(|len| format!("a=slice:0,{len}:file:/x"));
        let at = |place: &str| format!("b=slice:{place}:file:/x");
        let cases = [
            ([&first, &second, &at("2m,1m")], [false; 2], true),
            ([&first, &third, &at("2m,1m")], [false; 2], false),
            ([&first, &third, &at("2m")], [false; 2], false),
            ([&first, &third, &"b=file:/x".to_owned()], [false; 2], true),
            ([&second, &third, &at("1m,4m")], [false; 2], true),
            ([&first, &third, &at("2m,1m")], [true, false], false),
            ([&first, &third, &at("2m,1m")], [false, true], false),
            ([&first, &third, &at("2m,1m")], [true; 2], true),
            ([&first, &third, &at("2m,1m").replace("/x", "/y")], [false; 2], true),
        ];
        for (texts, is_shared, expected) in cases {
            assert_eq!(grows(texts.map(String::as_str), is_shared), expected, "{texts:?} {is_shared:?}");
        }
    }
}
