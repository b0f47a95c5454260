//! Ranks that are processes, connected by sockets. Each connection has a thread that writes and one that
//! reads.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{ChannelRank, GroupError};

/// The time between two attempts to connect or to accept.
const POLL: Duration = Duration::from_millis(5);

/// Makes a group of processes, as its rank 0: waits until the other ranks have called [`join_ranks`] with the
/// address of `listener`.
///
/// ```
/// use std::net::TcpListener;
/// use std::time::Duration;
///
/// use flashcore::parallel::{Collectives, host_ranks, join_ranks};
///
/// let time_out = Duration::from_secs(60);
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let address = listener.local_addr()?;
/// let other = std::thread::spawn(move || join_ranks(address, 1, 2, time_out)?.all_gather(&[1]));
/// assert_eq!(host_ranks(&listener, 2, time_out)?.all_gather(&[0])?, [[0], [1]]);
/// assert_eq!(other.join().unwrap()?, [[0], [1]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`GroupError::Connection`] when a rank has not joined within `time_out`, or two ranks have one number.
pub fn host_ranks(
    listener: &TcpListener,
    ranks: usize,
    time_out: Duration,
) -> Result<ChannelRank, GroupError> {
    let meeting = Meeting { rank: 0, ranks, deadline: Instant::now() + time_out };
    let mut streams = meeting.accept(listener, 1)?;
    // Each rank tells where it listens; all are told the addresses of all.
    let what = "exchange addresses";
    let mut addresses = Vec::new();
    for stream in streams.iter_mut().flatten() {
        let port = u16::from_le_bytes(meeting.check(what, read(stream))?);
        let ip = meeting.check(what, stream.peer_addr())?.ip();
        addresses.extend(format!("{}\n", SocketAddr::new(ip, port)).into_bytes());
    }
    for stream in streams.iter_mut().flatten() {
        meeting.check(what, write_message(stream, &addresses))?;
    }
    meeting.connected(streams, time_out)
}

/// Joins a group of processes as rank `rank` of `ranks`, 1 or more. `address` is that of rank 0
/// ([`host_ranks`]), which may begin to listen later.
///
/// # Errors
/// [`GroupError::Connection`] when the ranks have not met within `time_out`, or for another rank.
pub fn join_ranks(
    address: impl ToSocketAddrs,
    rank: usize,
    ranks: usize,
    time_out: Duration,
) -> Result<ChannelRank, GroupError> {
    let meeting = Meeting { rank, ranks, deadline: Instant::now() + time_out };
    if rank == 0 || rank >= ranks {
        let message = format!("invalid value '{rank}' for rank: expected 1 to {}", ranks.saturating_sub(1));
        return Err(meeting.failed("join", message));
    }
    let mut host = meeting.connect(&address)?;
    let what = "exchange addresses";
    let local = meeting.check(what, host.local_addr())?.ip();
    let listener = meeting.check(what, TcpListener::bind((local, 0)))?;
    let port = meeting.check(what, listener.local_addr())?.port();
    meeting.check(what, host.write_all(&port.to_le_bytes()))?;
    let addresses = meeting.check(what, read_message(&mut host))?;
    let addresses = String::from_utf8_lossy(&addresses).into_owned();
    let mut streams = vec![Some(host)];
    for address in addresses.lines().take(rank - 1) {
        streams.push(Some(meeting.connect(&address)?));
    }
    let later = meeting.accept(&listener, rank + 1)?;
    streams.push(None);
    streams.extend(later.into_iter().skip(rank + 1));
    meeting.connected(streams, time_out)
}

/// Ranks that connect to each other.
struct Meeting {
    rank: usize,
    ranks: usize,
    deadline: Instant,
}

impl Meeting {
    fn failed(&self, what: &'static str, message: impl ToString) -> GroupError {
        GroupError::Connection { rank: self.rank, what, message: message.to_string() }
    }

    fn check<T>(&self, what: &'static str, result: io::Result<T>) -> Result<T, GroupError> {
        result.map_err(|error| self.failed(what, error))
    }

    /// A connection of which no call waits longer than the meeting.
    fn ready(&self, stream: TcpStream) -> io::Result<TcpStream> {
        let left = self.deadline.saturating_duration_since(Instant::now()).max(POLL);
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))?;
        Ok(stream)
    }

    /// Connects to a rank, which may begin to listen later, and says which rank this one is.
    fn connect(&self, address: &impl ToSocketAddrs) -> Result<TcpStream, GroupError> {
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => {
                    let mut stream = self.check("connect", self.ready(stream))?;
                    self.check("connect", stream.write_all(&(self.rank as u64).to_le_bytes()))?;
                    return Ok(stream);
                }
                Err(error) if Instant::now() > self.deadline => return Err(self.failed("connect", error)),
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// The connections of the ranks from `first` on, by rank.
    fn accept(&self, listener: &TcpListener, first: usize) -> Result<Vec<Option<TcpStream>>, GroupError> {
        let what = "wait for other ranks";
        self.check(what, listener.set_nonblocking(true))?;
        let mut streams: Vec<Option<TcpStream>> = (0..self.ranks).map(|_| None).collect();
        while let Some(missing) = (first..self.ranks).find(|&rank| streams[rank].is_none()) {
            match listener.accept() {
                Ok((stream, _)) => {
                    let mut stream = self.check(what, self.ready(stream))?;
                    let rank = u64::from_le_bytes(self.check(what, read(&mut stream))?) as usize;
                    let place = streams.get_mut(rank).filter(|place| rank >= first && place.is_none());
                    let refused =
                        || self.failed(what, format!("rank {rank} joined twice or is none of the group"));
                    *place.ok_or_else(refused)? = Some(stream);
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(self.failed(what, error));
                }
                Err(_) if Instant::now() > self.deadline => {
                    return Err(self.failed(what, format!("rank {missing} has not joined in time")));
                }
                Err(_) => thread::sleep(POLL),
            }
        }
        Ok(streams)
    }

    /// The rank with its connections, by rank.
    fn connected(
        &self,
        streams: Vec<Option<TcpStream>>,
        time_out: Duration,
    ) -> Result<ChannelRank, GroupError> {
        let &Meeting { rank, ranks, .. } = self;
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for stream in streams {
            let (sender, written) = channel();
            let (arrived, receiver) = channel();
            match stream {
                None => drop((written, arrived)), // a rank sends itself nothing
                Some(stream) => self.check("start", bridge(stream, written, arrived))?,
            }
            senders.push(sender);
            receivers.push(receiver);
        }
        Ok(ChannelRank { rank, ranks, time_out, senders, receivers })
    }
}

/// Starts the threads of a connection. They end when a rank leaves, or the connection fails.
fn bridge(stream: TcpStream, written: Receiver<Vec<u8>>, arrived: Sender<Vec<u8>>) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    let (mut reader, mut writer) = (stream.try_clone()?, stream);
    thread::Builder::new().name("rank reader".to_owned()).spawn(move || {
        while let Ok(message) = read_message(&mut reader) {
            if arrived.send(message).is_err() {
                break;
            }
        }
    })?;
    thread::Builder::new().name("rank writer".to_owned()).spawn(move || {
        while let Ok(message) = written.recv() {
            if write_message(&mut writer, &message).is_err() {
                break;
            }
        }
        // The other rank reads what was sent, and then the end.
        let _ = writer.shutdown(Shutdown::Write);
    })?;
    Ok(())
}

fn read<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A message: its length, and its bytes. Memory grows with the bytes that arrive.
fn read_message(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let length = u64::from_le_bytes(read(from)?);
    let mut message = Vec::new();
    match from.take(length).read_to_end(&mut message)? as u64 {
        read if read == length => Ok(message),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn write_message(to: &mut impl Write, message: &[u8]) -> io::Result<()> {
    to.write_all(&(message.len() as u64).to_le_bytes())?;
    to.write_all(message)
}
