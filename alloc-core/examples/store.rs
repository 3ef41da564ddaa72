//! A store of documents on thermalloc: a server with a thread for each connection, and clients that use it over
//! TCP. What a profile of it says is in `docs/profiler.md`.
//!
//! ```sh
//! THERMALLOC_CONF=prof:true,prof_final:true cargo run --release -p thermalloc --example store -- 20000
//! thermalloc prof rss thermalloc.*.exit.thprof
//! ```
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

use thermalloc::prof;

#[global_allocator]
static GLOBAL: thermalloc::Thermalloc = thermalloc::Thermalloc;

const CLIENTS: u64 = 4;
/// Documents beyond this are dropped, oldest first.
const MOST_BYTES: usize = 64 << 20;

#[derive(Default)]
struct Store {
    documents: HashMap<String, Document>,
    /// Names by age.
    oldest: VecDeque<String>,
    /// How often each word occurs.
    words: BTreeMap<String, u64>,
    bytes: usize,
}

struct Document {
    body: String,
    versions: Vec<u64>,
}

static STORE: LazyLock<Mutex<Store>> = LazyLock::new(Mutex::default);

fn store() -> MutexGuard<'static, Store> {
    STORE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    fn put(&mut self, name: &str, body: &str) {
        let _scope = prof::scope("documents");
        let body = body.to_owned();
        self.bytes += body.len();
        for word in body.split(' ').take(20) {
            *self.words.entry(word.to_owned()).or_default() += 1;
        }
        match self.documents.get_mut(name) {
            Some(document) => {
                self.bytes -= document.body.len();
                document.versions.push(self.words.len() as u64);
                document.body = body;
            }
            None => {
                let document = Document { body, versions: Vec::new() };
                self.documents.insert(name.to_owned(), document);
                self.oldest.push_back(name.to_owned());
            }
        }
        while self.bytes > MOST_BYTES
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.bytes -= self.documents.remove(&oldest).map_or(0, |old| old.body.len());
        }
    }
}

/// Answers the lines of one connection: `put NAME BODY` and `get NAME`.
fn serve(connection: TcpStream) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut answers = BufWriter::new(connection.try_clone()?);
    for line in BufReader::new(connection).lines() {
        let line = line?;
        let mut parts = line.splitn(3, ' ');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("put"), Some(name), Some(body)) => {
                store().put(name, body);
                writeln!(answers, "ok")?;
            }
            (Some("get"), Some(name), None) => {
                let body = store().documents.get(name).map(|document| document.body.clone());
                writeln!(answers, "{}", body.unwrap_or_default())?;
            }
            _ => writeln!(answers, "what?")?,
        }
        answers.flush()?;
    }
    Ok(())
}

/// Makes that many requests; how many documents it got.
fn client(address: std::net::SocketAddr, seed: u64, requests: u64) -> io::Result<u64> {
    let connection = TcpStream::connect(address)?;
    connection.set_nodelay(true)?;
    let mut answers = BufReader::new(connection.try_clone()?);
    let mut requester = BufWriter::new(connection);
    let (mut random, mut got, mut answer) = (seed, 0, String::new());
    for _ in 0..requests {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = random >> 33;
        let name = number % 8000;
        if number % 3 == 0 {
            writeln!(requester, "get document-{name}")?;
        } else {
            write!(requester, "put document-{name}")?;
            for word in 0..number % 1500 {
                write!(requester, " word{}", (word * word + number) % 9973)?;
            }
            writeln!(requester)?;
        }
        requester.flush()?;
        answer.clear();
        answers.read_line(&mut answer)?;
        got += u64::from(answer.starts_with("word"));
    }
    Ok(got)
}

fn main() -> io::Result<()> {
    let requests = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            thread::spawn(move || serve(connection));
        }
    });
    let clients: Vec<_> =
        (1..=CLIENTS).map(|seed| thread::spawn(move || client(address, seed, requests))).collect();
    let mut got = 0;
    for client in clients {
        got += client.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
    }
    let store = store();
    writeln!(
        io::stdout(),
        "{got} documents were got; {} are kept, {} bytes, {} words",
        store.documents.len(),
        store.bytes,
        store.words.len()
    )
}
