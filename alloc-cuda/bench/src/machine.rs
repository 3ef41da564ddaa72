//! A pool on a simulated machine.

use std::sync::Arc;
use thermalloc_cuda::driver::{Driver, Stream, constant};
use thermalloc_cuda::{Pool, PoolBuilder};
use thermalloc_cuda_sim::{Config, Sim};

pub(crate) struct Machine {
    pub(crate) pool: Pool,
    pub(crate) driver: Arc<Driver>,
    pub(crate) sim: Sim,
}

/// A machine, and a pool made by `build`.
pub(crate) fn machine(config: Config, build: impl FnOnce(PoolBuilder) -> PoolBuilder) -> Machine {
    let sim = Sim::new(config);
    let driver = match sim.driver() {
        Ok(driver) => Arc::new(driver),
        Err(error) => panic!("{error}"),
    };
    let pool = sim
        .use_device(&driver, 0)
        .and_then(|_| build(Pool::builder(0)).build_on(Arc::clone(&driver)));
    match pool {
        Ok(pool) => Machine { pool, driver, sim },
        Err(error) => panic!("{error}"),
    }
}

impl Machine {
    pub(crate) fn stream(&self) -> Stream {
        let mut stream = Stream::NULL;
        // SAFETY: a valid place to write to.
        let made =
            unsafe { self.driver.stream_create(&raw mut stream, constant::STREAM_NON_BLOCKING) };
        if let Err(error) = made {
            panic!("{error}");
        }
        stream
    }
}

pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % n
    }
}
