// The health check of MongoDB: initiates the replica set on the first run; fails until this node is the primary.
const fs = require("fs");

const admin = db.getSiblingDB("admin");
admin.auth("root", fs.readFileSync("/secrets/root_password", "utf8"));
try {
  rs.status();
} catch (error) {
  if (error.codeName !== "NotYetInitialized") throw error;
  rs.initiate({ _id: "agentrl", members: [{ _id: 0, host: "mongo:27017" }] });
}
if (!db.hello().isWritablePrimary) quit(1);
