//! The loop that a command asks for.

use anyhow::Result;
use decode_loop::{Arm, DecodeLoop, Door, KvChoice, KvOptions, LoopOptions, Sampler, Sequence};
use structure_core::Registration;

use crate::args;

/// A loop and the store that it is built with.
pub struct Decode {
    door: Door,
    store: Option<Door>,
}

impl Decode {
    /// Finds both.
    pub fn new(args: &args::Kv) -> Result<Self> {
        let store = (args.kv != args::Kv::HOST).then(|| structures::decode_loop(&args.kv)).transpose()?;
        // A loop is no store, and says so here, before a model is loaded.
        store.map(|store| store.kv()).transpose()?;
        Ok(Decode { door: structures::decode_loop("whole_step")?, store })
    }

    /// What runs.
    pub fn registrations(&self) -> Vec<&'static Registration> {
        [Some(self.door), self.store].into_iter().flatten().map(|door| door.registration()).collect()
    }

    /// A loop with room for `window` positions.
    pub fn build<'a>(&self, host: Arm<'a>, window: usize) -> Result<Box<dyn DecodeLoop + 'a>> {
        let kv = match &self.store {
            None => KvChoice::Host,
            Some(store) => KvChoice::Store(store.kv()?, KvOptions::default()),
        };
        // A loop needs a position to be built, and refuses a prompt of none when it is asked.
        let sequence = Sequence { window: window.max(1), kv, ..Sequence::default() };
        Ok(self.door.build(host, &LoopOptions { sequence })?)
    }
}

/// The sampler that was asked for.
pub fn sampler(args: &args::Sampler) -> Sampler {
    let args::Sampler { temperature, top_k, top_p, seed } = *args;
    match temperature {
        Some(0.0) => Sampler::Greedy,
        None if top_k.is_none() && top_p.is_none() && seed.is_none() => Sampler::Greedy,
        _ => Sampler::Random {
            temperature: temperature.unwrap_or(1.0),
            top_k,
            top_p: top_p.unwrap_or(1.0),
            seed: seed.unwrap_or(0),
        },
    }
}
