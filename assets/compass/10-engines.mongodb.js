// Which engine is slow, and which one serves an old version?
// The speeds are those of the newest 1000 trajectories.
db.getCollection("audit_engines").aggregate([
  { $match: { status: { $ne: "stopped" } } },
  { $sort: { versions_behind: -1, tokens_per_second: 1 } },
  { $project: { url: 1, status: 1, policy_version: 1, newest_version: 1, versions_behind: 1, recent_calls: 1, seconds_per_call: 1, slowest_seconds: 1, tokens_per_second: 1, running_requests: 1, seconds_since_heartbeat: 1 } },
]).toArray();
