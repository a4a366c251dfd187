//! The configured targets of a protocol, found by the volumes that they have.

use std::collections::HashMap;
use std::ops::Deref;

/// A configured target.
pub(super) trait HasVolumes {
    /// The names of its volumes, perhaps with repetitions.
    fn volumes(&self) -> impl Iterator<Item = &str>;
}

/// Configured targets, in the order of the config.
#[derive(Clone, Debug)]
pub(super) struct ConfiguredTargets<T> {
    all: Vec<T>,
    /// The indexes of the targets that have a volume.
    of_volume: HashMap<String, Vec<usize>>,
}

impl<T> Default for ConfiguredTargets<T> {
    fn default() -> ConfiguredTargets<T> {
        ConfiguredTargets { all: Vec::new(), of_volume: HashMap::new() }
    }
}

impl<T: HasVolumes> ConfiguredTargets<T> {
    pub(super) fn push(&mut self, target: T) {
        let at = self.all.len();
        for volume in target.volumes() {
            let own = self.of_volume.entry(volume.to_owned()).or_default();
            if own.last() != Some(&at) {
                own.push(at);
            }
        }
        self.all.push(target);
    }

    /// The targets that have a volume, in order.
    pub(super) fn having(&self, volume: &str) -> impl Iterator<Item = &T> {
        let own = self.of_volume.get(volume).into_iter().flatten();
        own.filter_map(|at| self.all.get(*at))
    }
}

impl<T> Deref for ConfiguredTargets<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.all
    }
}

impl<T: HasVolumes> FromIterator<T> for ConfiguredTargets<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> ConfiguredTargets<T> {
        let mut targets = ConfiguredTargets::default();
        all.into_iter().for_each(|target| targets.push(target));
        targets
    }
}
