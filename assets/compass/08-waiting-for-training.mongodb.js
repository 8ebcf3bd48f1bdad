// What waits to be trained, for how long, and how stale has it become?
db.getCollection("audit_waiting").aggregate([
  { $match: { split: "train" } },
  { $sort: { created_at: 1 } },
  { $project: { task: 1, status: 1, score: 1, tokens: 1, min_version: 1, newest_version: 1, staleness_now: 1, seconds_waiting: 1, not_before_step: 1 } },
]).toArray();
